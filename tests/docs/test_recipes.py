"""The recipes of docs/extending.md work when followed exactly in a copy of the checkout (a minute or two each)."""

import os
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, Block, blocks

pytestmark = pytest.mark.slow
COPIED = ("src", "conf", "examples", "tests", "sweeps", "trust", "run.py", "pyproject.toml")
PAGE = (ROOT / "docs" / "extending.md").read_text()
HEADINGS = {PAGE.count("\n", 0, match.start()) + 1: match[1] for match in re.finditer(r"^## (.+)$", PAGE, re.M)}


def recipe_of(block: Block) -> str:
    """The heading above a block."""
    return HEADINGS[max(line for line in HEADINGS if line < block.line)]


STEPS = [block for block in blocks() if block.is_recipe and block.document == "extending.md"]
RECIPES = {name: list(steps) for name, steps in groupby(STEPS, key=recipe_of)}


def edited(text: str, changes: str) -> str:
    """`text` with the changes applied; each part between `@@` must occur exactly once."""
    for part in re.split(r"^@@\n", changes, flags=re.M):
        lines = [(line[:1], line[1:]) for line in part.splitlines()]
        before = "".join(f"{rest}\n" for sign, rest in lines if sign != "+")
        after = "".join(f"{rest}\n" for sign, rest in lines if sign != "-")
        assert text.count(before) == 1, f"missing, or more than once:\n{before}"
        text = text.replace(before, after)
    return text


def without_numbers(text: str) -> str:
    """The text with numbers replaced, as times and losses differ between machines."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def follow(commands: str, folder: Path) -> None:
    """Run the lines that begin with `$`; each must print the lines below it, apart from numbers."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for command, *shown in (part.splitlines() for part in re.split(r"^\$ ", commands, flags=re.M) if part):
        done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        for line in shown:
            wanted, output = (
                (line, done.stdout) if "passed" in line else (without_numbers(line), without_numbers(done.stdout))
            )
            assert wanted in output, f"{command} does not print {line!r}:\n{done.stdout[-2000:]}"


def test_recipes_are_complete() -> None:
    assert list(RECIPES) == ["A layer rule", "A clipping rule", "A task"]
    assert all(steps[-1].mark == "run" for steps in RECIPES.values())


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_works(name: str, tmp_path: Path) -> None:
    for part in COPIED:
        source = ROOT / part
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, tmp_path / part, ignore=ignored) if source.is_dir() else shutil.copy(source, tmp_path)
    for step in RECIPES[name]:
        kind, _, target = step.mark.partition(": ")
        path = tmp_path / target
        if kind == "run":
            follow(step.text, tmp_path)
        elif kind == "file":
            assert not path.exists(), f"{target} already exists"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
        else:
            path.write_text(edited(path.read_text(), step.text))
