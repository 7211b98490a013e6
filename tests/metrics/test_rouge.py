import pytest
from rouge_score.rouge_scorer import RougeScorer

from groupwise.metrics import e2e_rouge_l, rouge

NAMES = ["rouge1", "rouge2", "rougeL"]


def by_rouge_score(hypotheses, references):
    scorer = RougeScorer(NAMES, use_stemmer=True)
    means = {}
    for name in NAMES:
        best = [
            max(scorer.score(reference, hypothesis)[name].fmeasure for reference in texts)
            for hypothesis, texts in zip(hypotheses, references, strict=True)
        ]
        means[name] = 100 * sum(best) / len(best)
    return means


def test_rouge_by_hand():
    # Stems: for jerri amanda is bake cooki (6) and amanda bake cooki and bring them to jerri tomorrow (9).
    #   1-grams in common: amanda, bake, cooki, jerri: P = 4/6, R = 4/9, F = 2 · 4 / (6 + 9)
    #   2-grams: bake cooki alone, of 5 and 8: F = 2 · 1 / (5 + 8)
    #   longest common subsequence: amanda bake cooki: F = 2 · 3 / (6 + 9)
    scores = rouge(
        ["For Jerry, Amanda is baking cookies."], [["Amanda baked cookies and brings them to Jerry tomorrow"]]
    )
    assert scores == pytest.approx({"rouge1": 800 / 15, "rouge2": 200 / 13, "rougeL": 600 / 15}, rel=1e-12)


def test_rouge_takes_the_best_reference_for_each_score_and_the_mean_over_texts():
    # "a b c d" against "d c b a e" has F1 = 2 · 4 / 9, no 2-gram, LCS 1; against "a b" 1-grams F = 2 · 2 / 6,
    # 2-grams F = 2 · 1 / (3 + 1), LCS 2: F = 2 · 2 / 6. The second text scores 0.
    scores = rouge(["a b c d", "x"], [["d c b a e", "a b"], ["y"]])
    assert scores == pytest.approx({"rouge1": 400 / 9, "rouge2": 25, "rougeL": 100 / 3}, rel=1e-12)


def test_rouge_l_treats_a_line_break_as_a_space():
    assert rouge(["a b\nc d"], [["c d a b"]])["rougeL"] == pytest.approx(50)  # by sentence it would be 100


def test_e2e_rouge_l_takes_precision_and_recall_each_from_its_best_reference():
    # "a b c d": against "a b c x y z" LCS 3, P = 3/4, R = 3/6; against "d" LCS 1, P = 1/4, R = 1/1.
    # P = 3/4 and R = 1: F = 2.44 · 0.75 / (1 + 1.44 · 0.75) = 0.8798; one reference alone gives 0.579 or 0.449.
    expected = 100 * 2.44 * 0.75 / (1 + 1.44 * 0.75)
    assert e2e_rouge_l(["a b c d"], [["a b c x y z", "d"]]) == pytest.approx(expected, rel=1e-12)
    # Recall counts more: "a b" against "a b c d" P = 1, R = 1/2; the other way round it is higher.
    assert e2e_rouge_l(["a b"], [["a b c d"]]) == pytest.approx(100 * 2.44 * 0.5 / (0.5 + 1.44), rel=1e-12)
    assert e2e_rouge_l(["a b c d"], [["a b"]]) == pytest.approx(100 * 2.44 * 0.5 / (1 + 1.44 * 0.5), rel=1e-12)


def test_e2e_rouge_l_is_a_mean_over_texts_and_0_without_a_common_token():
    assert e2e_rouge_l(["a b", "x", "", "."], [["a b"], ["y"], ["y"], ["."]]) == pytest.approx(25)


def test_e2e_rouge_l_leaves_case_and_punctuation_out_and_brackets_in():
    assert e2e_rouge_l(["A. \"b\", 'c' - d!"], [["a b 'c' d?"]]) == pytest.approx(100)
    # a ( b ) against a b: P = 2/4, R = 1
    assert e2e_rouge_l(["a (b)"], [["a b"]]) == pytest.approx(100 * 2.44 * 0.5 / (1 + 1.44 * 0.5), rel=1e-12)


def test_real_texts(e2e_dev):
    hypotheses, references = e2e_dev
    first_texts = hypotheses[:15], references[:15]  # stemming is slow
    scores = rouge(*first_texts)
    assert scores == pytest.approx(by_rouge_score(*first_texts), rel=1e-12)
    assert 70 < scores["rouge1"] < 95
    assert 45 < scores["rouge2"] < scores["rougeL"] < 80
    # The challenge's own programs (Stanford's tokeniser, pycocoevalcap) give 65.284 on the same texts.
    assert e2e_rouge_l(hypotheses, references) == pytest.approx(65.284, abs=0.1)
