"""Synthetic texts are deterministic, have the expected sizes, and are disjoint between splits."""

from collections import Counter

import pytest

from groupwise.data.glue import GLUE
from groupwise.data.synthetic_text import synthetic_labelled, synthetic_paired

SHA256 = {
    "sst2": "5d8014be698d6032a5b69a9670fc355f134c9d55903435ebb81eca9e9a52efe9",
    "qnli": "f4218fe4c47235345abcf7d68e4e25d1991b5352518c2654f7262d9867536e7a",
    "qqp": "5342fae8c0635612f23443922924eb952cb96b1628eb0c915848e24a3b10583b",
    "mnli": "94609437eda8296c58682b80153af6941318dd42a120f56eb655943cbc2cf64a",
    "e2e": "5e39c8fbcfae711ef02df014f0d1de1e8b0512bcd5a5fdf31b9a7a06b87c4517",
    "dart": "b843aae404a02cc041937d52cc5e82ccafe1dfccb8e754b269f24782357be780",
    "samsum": "597425e79089bd9bd8d5553718838ffdc581ccdda2625a83862281ae77a97a50",
}
"""Hashes of all examples with seed 0, on every machine and Python version."""

LABELLED, PAIRED = ("sst2", "qnli", "qqp", "mnli"), {"e2e": 4, "dart": 2, "samsum": 1}


@pytest.mark.parametrize("task", SHA256)
def test_content_is_deterministic(task):
    data = synthetic_labelled(task) if task in LABELLED else synthetic_paired(task)
    assert data.sha256 == {f"synthetic/{task}": SHA256[task]}
    assert data.source == "made up by groupwise from templates (seed 0)"


@pytest.mark.parametrize("task", LABELLED)
def test_labelled_texts_are_balanced_and_distinct(task):
    data = synthetic_labelled(task)
    assert data.classes == GLUE[task].classes and list(data.valid) == list(GLUE[task].valid)
    assert len(data.train) == 2000 and {len(part) for part in data.valid.values()} == {200}
    for part in (data.train, *data.valid.values()):
        shares = Counter(part.labels)
        assert set(shares) == set(range(len(data.classes))) and max(shares.values()) - min(shares.values()) <= 1
        assert part.labels[:50] != sorted(part.labels[:50])
    texts = [texts for part in (data.train, *data.valid.values()) for texts in part.texts]
    assert len(set(texts)) == len(texts)
    assert all((second is None) == (task == "sst2") for _, second in texts)
    assert all(side == side.strip() != "" for pair in texts for side in pair if side is not None)


@pytest.mark.parametrize("task", PAIRED)
def test_pairs_share_no_source_between_splits(task):
    data = synthetic_paired(task)
    assert len(data.train) == 2000 and len(data.valid) == len(data.test) == 100
    rows = Counter(source for source, _ in data.train)
    assert set(rows.values()) == {PAIRED[task]}
    asked = [request.source for request in (*data.valid, *data.test)]
    assert len(set(asked)) == 200 and not set(asked) & set(rows)
    assert {len(set(request.references)) for request in (*data.valid, *data.test)} == {PAIRED[task]}
    assert all(text == text.strip() != "" for pair in data.train for text in pair)
