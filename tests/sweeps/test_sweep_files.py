"""Every file of `sweeps/` has a heading with title and command, and its cells compose at all scales."""

from pathlib import Path

import pytest

from groupwise.sweeps.cells import PAPER, read_sweep
from tests.combinations import each_value_once, run

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in (ROOT / "sweeps").glob("*.yaml") if "grids:" in file.read_text())
ROWS = {file.stem for file in (ROOT / "results" / "measured").glob("*.csv")}


def is_slow(file: Path, scale: str) -> bool:
    """Whether the file is a search, or has rows (whose cells are composed in test_committed_rows.py)."""
    return file.stem.startswith("search_") or f"{file.stem}_{scale}" in ROWS


SCALES = [(file, scale) for file in FILES for scale in (PAPER, *read_sweep(file).scales)]


def name_of(value: Path | str) -> str:
    return value if isinstance(value, str) else value.stem


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_heading_has_title_command_and_expected_result(file):
    heading = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert heading[0].endswith(".") and heading[1].startswith(f"#   python run.py -m +sweep={file.stem}")
    assert any(line.startswith("# Expected: ") for line in heading)


@pytest.mark.parametrize(
    ("file", "scale"),
    [pytest.param(*case, marks=[pytest.mark.slow] if is_slow(*case) else []) for case in SCALES],
    ids=name_of,
)
def test_every_value_of_a_cell_composes(file, scale):
    cells = [tuple(o for o in cell.overrides if not o.startswith("seed=")) for cell in read_sweep(file).cells(scale)]
    first, *others = each_value_once(cells)
    for overrides in (first, *others):
        assert run(*overrides).scale == scale
    assert run(f"+sweep={file.stem}", *first) == run(*first)
