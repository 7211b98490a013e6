"""The grammar: every entry of its language does what its table says, and the files of rules are complete."""

import random
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from groupwise.data import synthetic_text
from groupwise.data.synthetic_text import follow, read_rules

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src/groupwise/data/synthetic").glob("*.yaml"))
DRAWS = 400


@pytest.fixture
def outcomes(monkeypatch):
    """How often each tuple of names comes out of a program that is given as YAML."""

    def count(rules: str, wanted: str, **names: object) -> Counter[tuple[object, ...]]:
        monkeypatch.setattr(synthetic_text, "read_rules", lambda file: yaml.safe_load(rules))
        rng = random.Random(0)
        ends = (follow("given", "program", rng, **names) for _ in range(DRAWS))
        return Counter(tuple(end[name] for name in wanted.split()) for end in ends)

    return count


def test_a_name_is_bound_once_and_a_rule_is_drawn_at_each_mention(outcomes):
    found = outcomes("{coin: [h, t], program: {x: <coin>, text: '{x}{x}<coin>'}}", "text")
    assert set(found) == {("hhh",), ("hht",), ("ttt",), ("tth",)} and min(found.values()) > 60


def test_a_list_is_drawn_from_uniformly_and_its_texts_are_written_out(outcomes):
    found = outcomes("{program: {x: a, text: ['1{x}', '2{x}', '2{x}', 4]}}", "text")
    assert set(found) == {("1a",), ("2a",), ("4",)}
    assert 150 < found["2a",] < 250 and 60 < found["1a",] < 140


def test_several_names_are_drawn_without_replacement(outcomes):
    found = outcomes("{letters: [a, b, c], program: {'x, y': <letters>}}", "x y")
    assert len(found) == 6 and all(x != y for x, y in found)


def test_a_record_names_its_fields(outcomes):
    found = outcomes("{pairs: [[a, A], [b, B]], program: {'x X, y _': <pairs>}}", "x X y")
    assert set(found) == {("a", "A", "b"), ("b", "B", "a")}


def test_but_leaves_out_what_names_stand_for(outcomes):
    found = outcomes("{letters: [a, b, c, d], program: [{'x, y': <letters>}, {z but x y: <letters>}]}", "x y z")
    assert len(found) == 24 and all(z not in (x, y) for x, y, z in found)


def test_one_of_follows_a_rule_or_a_program_and_what_comes_after(outcomes):
    found = outcomes("{rule: {x: a}, program: {one of: [rule, {x: b}, {x: c}], y: '{x}!'}}", "y")
    assert set(found) == {("a!",), ("b!",), ("c!",)} and min(found.values()) > 90


def test_chance_follows_the_first_that_often(outcomes):
    found = outcomes("{program: {chance: {0.9: {x: a}, else: {x: b}}}}", "x")
    assert 330 < found["a",] < 390 and found["a",] + found["b",] == DRAWS


def test_by_follows_the_program_of_a_value_or_else(outcomes):
    rules = "{program: {by my label: {0: {x: zero}, '': {x: none}, else: {x: 'so {my label}'}}}}"
    assert [set(outcomes(rules, "x", **{"my label": label})) for label in (0, "", "what")] == [
        {("zero",)},
        {("none",)},
        {("so what",)},
    ]


def test_a_value_that_no_program_is_for_is_no_example(outcomes):
    with pytest.raises(KeyError):
        outcomes("{program: {by label: {0: {x: zero}}}}", "x", label=1)


def test_combinations_and_counts_are_written_out():
    kinds = read_rules("facts")["kinds"]
    assert kinds[0]["names"][:2] == ["Mara Velden", "Mara Karst"] and len(kinds[0]["names"]) == 16 * 14
    lengths = kinds[1]["attributes"][0]["values"]
    assert lengths[:2] == ["80 km", "90 km"] and lengths[-1] == "890 km"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_rule_that_a_text_names_exists_and_no_word_was_read_as_something_else(file: Path):
    rules, texts, odd = read_rules(file.stem), [], []

    def walk(node: object) -> None:
        if isinstance(node, dict | list):
            for child in [*node, *node.values()] if isinstance(node, dict) else node:
                walk(child)
        else:
            (texts if isinstance(node, str) else odd).append(node)

    walk(rules)
    assert texts and {mark for text in texts for mark in re.findall(r"<(\w+)>", text)} <= set(rules)
    assert all(isinstance(value, int | float) and not isinstance(value, bool) for value in odd)  # YAML's yes, no and on


def test_an_installed_package_has_every_file_that_is_not_code():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["groupwise"]
    package = ROOT / "src/groupwise"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert set(FILES) <= packed and others <= packed
