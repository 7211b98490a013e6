"""Corpus BLEU with several references a text, as the E2E NLG Challenge computes it."""

from collections.abc import Sequence

from groupwise.errors import UserError


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU-4 of all texts together, in percent, by sacrebleu.

    The settings are those of the challenge's measure_scores.py (its Python scorer, pymteval): tokens of mteval-v13a in
    lower case; n-gram counts clipped at the most that one reference has; the brevity penalty on the reference closest
    in length, the shorter of two that are equally close; no smoothing.

    The two differ in corners only. Where not a single 4-gram of the whole corpus matches, this is 0, and pymteval,
    which never takes the logarithm of 0, gives some hundredths. For a hypothesis of one or two tokens pymteval counts
    4-grams (and 3-grams) below zero; here there are none. An empty hypothesis is one token there, and none here.

    Args:
        hypotheses: n texts, as generated (not tokenised).
        references: for each of them one or more texts; their number may differ.

    Raises:
        UserError: no hypotheses.
        ValueError: not one non-empty list of references for each hypothesis.
    """
    check_texts(hypotheses, references)
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    columns = [[texts[k] if k < len(texts) else None for texts in references] for k in range(most)]
    # force: no word to stderr about texts that end in " ."
    scorer = BLEU(tokenize="13a", lowercase=True, smooth_method="none", force=True)
    return float(scorer.corpus_score(list(hypotheses), columns).score)  # type: ignore[arg-type]


def check_texts(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse what has no score; raises as `corpus_bleu` says."""
    if not hypotheses:
        raise UserError("No texts were generated, so there is nothing to score: generate for at least one input.")
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses were given with references for {len(references)}.")
    for number, texts in enumerate(references):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"Hypothesis {number} must have a non-empty list of references; {texts!r} was given.")
