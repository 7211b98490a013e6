"""Every block of code in the documents is of a tested kind, and Python blocks run."""

import io
import json
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from tests.docs.documents import DOCUMENTS, ROOT, Block, blocks
from trust.errata import sizes

PYTHON = [block for block in blocks("python") if not block.is_recipe]


@cache  # each calibrates a noise multiplier
def execute(code: str) -> str:
    """Run a snippet in its own namespace; returns its output."""
    printed = io.StringIO()
    with redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.name)
def test_block_is_of_a_tested_kind(block: Block) -> None:
    """A block whose language or mark is not in the table of tests/docs/documents.py fails."""
    allowed = {
        "python": block.mark in ("", "slow"),
        "bash": block.mark == "",
        "text": block.mark.startswith("printed by: "),
        "bibtex": block.text.startswith("@inproceedings{"),
    }
    assert block.is_recipe or allowed.get(block.language, False), f"```{block.language} with the mark {block.mark!r}"


def test_every_fence_is_parsed() -> None:
    for path in DOCUMENTS:
        fences = len(re.findall(r"^\s*(```|~~~)", path.read_text(), re.M))
        assert fences == 2 * len([block for block in blocks() if block.document == path.name]), path.name


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name, marks=[pytest.mark.slow] if b.mark == "slow" else []) for b in PYTHON]
)
def test_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(block.text)


@pytest.mark.parametrize("block", blocks("yaml", "json"), ids=lambda block: block.name)
def test_data_block_is_valid(block: Block) -> None:
    assert (yaml.safe_load if block.language == "yaml" else json.loads)(block.text)


def test_readme_has_at_most_sixteen_lines_of_code_before_any_table() -> None:
    [block] = [block for block in PYTHON if block.document == "README.md"]
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 16
    readme = (ROOT / "README.md").read_text()
    assert readme.index(block.text) < readme.index("\n|")
    assert len(readme) <= 9000


@pytest.mark.slow
def test_errata_quotes_what_its_script_computes() -> None:
    lines = list(sizes())
    page = (ROOT / "docs" / "errata.md").read_text()
    assert len(lines) > 10
    for line in lines:
        for number in re.findall(r"(?<![\w.])\d+\.\d+", line.partition(":")[2]):
            assert re.search(rf"(?<![\d.]){re.escape(number)}0*(?!\d)", page), f"{number} of '{line}' is missing"
