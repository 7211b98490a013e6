"""Scores generated texts against references: BLEU with sacrebleu, ROUGE with rouge-score."""

from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace


def check_installed() -> None:
    """Raise `ModuleNotFoundError` if a package that scores texts is missing; called before training."""
    for package in ("sacrebleu", "rouge_score"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU-4, in percent, computed by sacrebleu.

    The settings are those of the E2E challenge's measure_scores.py (its Python scorer, pymteval): lower-case tokens of
    mteval-v13a; n-gram counts clipped at the maximum over the references; a brevity penalty for the reference closest
    in length, the shorter one of a tie; no smoothing.

    The two scorers differ only in rare cases. If no 4-gram of the whole corpus matches, BLEU is 0 here and a few
    hundredths in pymteval. For a hypothesis of one or two tokens, pymteval counts a negative number of 4-grams (and
    3-grams); here it is 0. An empty hypothesis has one token there, and none here.

    Args:
        hypotheses: n texts, as generated (not tokenised).
        references: for each of them one or more texts; their number may differ.
    """
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    columns = [[texts[k] if k < len(texts) else None for texts in references] for k in range(most)]
    # force: no warning about texts that end in " ."
    scorer = BLEU(tokenize="13a", lowercase=True, smooth_method="none", force=True)
    return float(scorer.corpus_score(list(hypotheses), columns).score)  # type: ignore[arg-type]


BETA = 1.2
"""The weight of recall relative to precision in the challenge's F score."""
DROPPED = frozenset({"'", '"', "`", "''", "``", ".", "?", "!", ",", ":", ";", "-", "--", "..."})
"""Tokens that the challenge removes; it keeps brackets."""


def rouge(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean F1 over texts of ROUGE-1, ROUGE-2 and ROUGE-L, in percent, as SAMSum is scored.

    Tokens are lower-case sequences of letters and digits, reduced to Porter stems. ROUGE-L treats a text as one
    sentence. Of several references, the one with the best score counts, for each score separately (`score_multi`).

    Args are those of `corpus_bleu`. Returns {"rouge1", "rouge2", "rougeL"}.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    totals = dict.fromkeys(names, 0.0)
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        scores = scorer.score_multi(texts, hypothesis)
        for name in names:
            totals[name] += float(scores[name].fmeasure)
    return {name: 100.0 * total / len(hypotheses) for name, total in totals.items()}


def e2e_rouge_l(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean over texts of the COCO captions' ROUGE-L, in percent, as the E2E NLG Challenge scores it.

    For each text P = max over references of LCS / len(hypothesis), R = max over references of LCS / len(reference),
    and F = (1 + β²) P R / (R + β² P) with β = 1.2, or 0 if P or R is 0. P and R may be of different references.

    Tokens are those of mteval-v13a (from sacrebleu) in lower case, without punctuation marks. The challenge uses the
    Stanford Penn Treebank tokeniser, a Java program, and removes the same marks. That tokeniser also splits clitics
    (it 's, do n't) and treats some signs differently. If the first human reference of each input is scored against the
    others, its pipeline and this one give 65.28 and 65.25 on E2E's development set, 63.81 and 63.75 on its test set,
    and 61.83 and 61.89 on DART's development set. A single text can differ by 10 points or more.

    Args are those of `corpus_bleu`.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    split = Tokenizer13a()
    tokens = SimpleNamespace(tokenize=lambda text: [t for t in split(text.lower()).split() if t not in DROPPED])
    scorer = RougeScorer(["rougeL"], tokenizer=tokens)
    total = 0.0
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        scores = [scorer.score(text, hypothesis)["rougeL"] for text in texts]
        precision, recall = max(score.precision for score in scores), max(score.recall for score in scores)
        if precision and recall:
            total += (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return 100.0 * total / len(hypotheses)
