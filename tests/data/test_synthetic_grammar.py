"""The rule files of synthetic texts name only existing rules."""

import re
from pathlib import Path

import pytest

from groupwise.data.synthetic_text import read_rules

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src/groupwise/data/synthetic").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_named_rule_exists_and_no_word_is_read_as_a_boolean(file: Path):
    rules, texts, others = read_rules(file.stem), [], []

    def walk(node: object) -> None:
        if isinstance(node, dict | list):
            for child in [*node, *node.values()] if isinstance(node, dict) else node:
                walk(child)
        else:
            (texts if isinstance(node, str) else others).append(node)

    walk(rules)
    assert texts and {mark for text in texts for mark in re.findall(r"<(\w+)>", text)} <= set(rules)
    assert all(isinstance(value, int | float) and not isinstance(value, bool) for value in others)  # not yes or no
