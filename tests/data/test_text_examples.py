"""Targets are gathered by source, and examples have a fingerprint of their own."""

import hashlib

import pytest

from groupwise.data.text_examples import Labelled, Request, by_source, sha256_of_examples


def test_the_targets_of_a_source_come_together_in_order():
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("a", "1")]
    assert by_source(pairs) == [Request("a", ("1", "3", "1")), Request("b", ("2",)), Request("c", ("4",))]


def test_labelled_texts_have_a_length():
    assert len(Labelled([("a", None), ("b", "c")], [0, 1])) == 2


def test_the_fingerprint_is_of_the_json():
    assert sha256_of_examples([["é", 1]]) == hashlib.sha256('[["é", 1]]'.encode()).hexdigest()


@pytest.mark.parametrize("other", [[["a", 0]], [["a", "1"]], [["a"], 1], [["b", 1]]])
def test_other_examples_have_another_fingerprint(other):
    assert sha256_of_examples([["a", 1]]) != sha256_of_examples(other)
