import math

import pytest
import sacrebleu

from groupwise import metrics
from groupwise.metrics import corpus_bleu


def by_sacrebleu(hypotheses, references):
    """sacrebleu with equal numbers of references; repeated references change nothing."""
    most = max(map(len, references))
    columns = [[texts[min(k, len(texts) - 1)] for texts in references] for k in range(most)]
    return sacrebleu.corpus_bleu(hypotheses, columns, tokenize="13a", lowercase=True, smooth_method="none").score


def test_two_texts_by_hand():
    # Text 1: the cat sat on the mat (6 tokens); its references have 6 and 8, so the closest length is 6.
    #   1-grams: "the" twice, but at most once in any one reference: 5 of 6
    #   2-grams: the cat, cat sat, sat on (first reference), on the, the mat (second): 5 of 5
    #   3-grams: the cat sat, cat sat on (first), on the mat (second), not sat on the: 3 of 4
    #   4-grams: the cat sat on (first): 1 of 3
    # Text 2: a dog , barking . (5 tokens); its references have 7 and 11, so the closest length is 7.
    #   1-grams: a dog barking (first) , . (second): 5 of 5
    #   2-grams: a dog (first), "dog ,", "barking ." (second), not ", barking": 3 of 4
    #   3-grams: 0 of 3, 4-grams: 0 of 2
    # Together 10/11, 8/9, 3/7, 1/5; 11 tokens against 13, so the brevity penalty is exp(1 - 13/11).
    hypotheses = ["The cat sat on the mat", "A dog, barking."]
    references = [
        ["the cat sat on a mat", "There is a cat on the mat."],
        ["A dog is barking in the street", "A big dog, old and grey, is barking."],
    ]
    precisions = 10 / 11 * 8 / 9 * 3 / 7 * 1 / 5
    expected = 100 * math.exp(1 - 13 / 11) * precisions**0.25
    assert corpus_bleu(hypotheses, references) == pytest.approx(expected, rel=1e-12)


def test_shorter_of_two_equally_close_references_counts():
    # All n-grams of "a b c d e" match; the references have 4 and 6 tokens, and only against 6 is there a penalty.
    assert corpus_bleu(["a b c d e"], [["a b c d e f", "a b c d"]]) == pytest.approx(100)
    assert corpus_bleu(["a b c d e"], [["a b c d e f"]]) == pytest.approx(100 * math.exp(1 - 6 / 5))


def test_case_and_missing_spaces_before_punctuation_do_not_matter():
    assert corpus_bleu(["THE Eagle , near Burger King ."], [["the eagle, near burger king."]]) == pytest.approx(100)


def test_numbers_of_references_may_differ():
    hypotheses = ["a b c d e", "c d e f g h", "x y z q w"]
    references = [["a b c d f"], ["c d e f", "b c d e f g i j", "c d e g h"], ["x y z q v w", "z q w"]]
    score = corpus_bleu(hypotheses, references)
    assert 0 < score < 100
    assert score == pytest.approx(by_sacrebleu(hypotheses, references), rel=1e-12)
    assert score == pytest.approx(corpus_bleu(hypotheses[::-1], references[::-1]), rel=1e-12)


def test_bleu_is_not_smoothed():
    assert corpus_bleu(["a b c d"], [["a b c e"]]) == 0
    assert corpus_bleu(["", "a b c d e"], [["x"], ["a b c d e"]]) == pytest.approx(100 * math.exp(1 - 6 / 5))
    assert corpus_bleu([""], [["a"]]) == 0


def test_no_warning_about_texts_that_end_in_a_spaced_full_stop(capfd):
    corpus_bleu(["a b c d ."] * 200, [["a b c d ."]] * 200)
    assert capfd.readouterr() == ("", "")


def test_real_texts(e2e_dev):
    # The challenge's own scorer, pymteval, gives 59.953459442534 on the same texts.
    assert corpus_bleu(*e2e_dev) == pytest.approx(59.953459442534, rel=1e-12)
    first_texts = [texts[:60] for texts in e2e_dev]
    score = corpus_bleu(*first_texts)
    assert 45 < score < 75
    assert score == pytest.approx(by_sacrebleu(*first_texts), rel=1e-12)


def test_missing_package_raises_before_training(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "rouge_score" else object())
    with pytest.raises(ModuleNotFoundError, match="rouge_score"):
        metrics.check_installed()
