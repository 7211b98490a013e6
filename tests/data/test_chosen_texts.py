"""Held-out shares and limits of text data are deterministic, disjoint and decided for each row separately."""

from collections import Counter
from dataclasses import replace

import pytest

from groupwise.data.text_examples import Labelled, LabelledText, PairedText, Request, hold_out, keep
from groupwise.errors import UserError


@pytest.fixture
def labelled() -> LabelledText:
    train = Labelled([(f"text {i}", None) for i in range(100)], [i % 2 for i in range(100)])
    other = Labelled([("other", None)], [0])
    return LabelledText(train, {"": other, "mismatched": other}, ("no", "yes"), "made here", {"a": "b"})


@pytest.fixture
def paired() -> PairedText:
    train = [(f"source {i % 37}", f"target {i}") for i in range(100)]
    return PairedText(train, [Request("v", ("w",))], [Request("t", ("u",))], "made here", {"a": "b"})


def test_share_of_labelled_texts_is_held_out(labelled):
    split = hold_out(labelled, 0.2)
    assert list(split.valid) == [""] and len(split.valid[""]) == 20 and len(split.train) == 80
    both = [*split.train.texts, *split.valid[""].texts]
    assert sorted(both) == sorted(labelled.train.texts)
    truth = dict(zip(labelled.train.texts, labelled.train.labels, strict=True))
    for part in (split.train, split.valid[""]):
        assert part.labels == [truth[texts] for texts in part.texts]
    assert split.train.texts == [texts for texts in labelled.train.texts if texts in set(split.train.texts)]
    assert split.source == "made here; 0.2 of the training set held out to validate on (seed 0)"
    assert split.sha256 == labelled.sha256 and split.classes == labelled.classes


def test_held_out_pairs_share_no_source_with_the_others(paired):
    split = hold_out(paired, 0.2)
    held = [(request.source, target) for request in split.valid for target in request.references]
    assert not {source for source, _ in split.train} & {source for source, _ in held}
    assert Counter(split.train) + Counter(held) == Counter(paired.train)
    assert 8 <= len(held) <= 40  # about a fifth, by sources
    assert split.test == paired.test


def test_side_of_a_row_does_not_depend_on_other_rows(paired):
    """Otherwise adding one row to the file could add or remove many training examples."""
    split = hold_out(paired, 0.2)
    for left_out in range(0, len(paired.train), 7):
        rest = paired.train[:left_out] + paired.train[left_out + 1 :]
        other = hold_out(replace(paired, train=rest), 0.2)
        assert other.train == [pair for pair in split.train if pair != paired.train[left_out]]
        assert {r.source for r in other.valid} <= {r.source for r in split.valid}


def test_labelled_rows_are_chosen_by_their_number(labelled):
    """So the content of one row affects only that row."""
    other = replace(
        labelled,
        train=Labelled([("blank", None) if i % 3 else text for i, text in enumerate(labelled.train.texts)],
                       labelled.train.labels),
    )  # fmt: skip
    for choose in (
        lambda data: keep(data, 30),
        lambda data: hold_out(data, 0.2),
        lambda data: keep(hold_out(data, 0.2), 9),
    ):
        one, same = choose(labelled).train.texts, choose(other).train.texts
        assert [b if b[0] == "blank" else a for a, b in zip(one, same, strict=True)] == same


def test_split_is_always_the_same(labelled, paired):
    assert [held.source for held in hold_out(paired, 0.05).valid] == [f"source {i}" for i in (2, 10, 21, 24, 32)]
    assert hold_out(labelled, 0.05).valid[""].texts == [(f"text {i}", None) for i in (7, 8, 11, 23, 48)]


@pytest.mark.parametrize("share", [0.0, 0.001, 1.0, 1.5, -0.2])
def test_share_that_leaves_a_side_empty_is_refused(labelled, paired, share):
    for data in (labelled, paired):
        with pytest.raises(UserError, match=f"data.holdout={share}"):
            hold_out(data, share)


def test_single_source_cannot_be_split():
    data = PairedText([("s", "a"), ("s", "b")], [], [], "", {})
    with pytest.raises(UserError, match=r"data.holdout=0.5 of 2 training examples leaves one set empty"):
        hold_out(data, 0.5)


def test_limit_keeps_order_and_is_part_of_a_larger_limit(labelled, paired):
    few, more = keep(labelled, 10), keep(labelled, 30)
    assert keep(labelled, 100) is labelled and keep(paired, 200) is paired
    assert (len(few.train), len(more.train)) == (10, 30)
    assert set(few.train.texts) < set(more.train.texts)
    order = [labelled.train.texts.index(texts) for texts in more.train.texts]
    assert order == sorted(order) != list(range(30))
    assert more.train.labels == [labelled.train.labels[i] for i in order]
    assert few.valid == labelled.valid
    assert few.source == "made here; 10 of 100 training examples kept (seed 0)"
    assert keep(paired, 10).train == [paired.train[labelled.train.texts.index(texts)] for texts in few.train.texts]
