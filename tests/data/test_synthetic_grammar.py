"""The rule files of synthetic texts name only existing rules, and are part of the installed package."""

import re
import tomllib
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


def test_package_data_includes_every_file_that_is_not_code():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["groupwise"]
    package = ROOT / "src/groupwise"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    assert set(FILES) <= packed and others <= packed
