"""A sweep file expands to every combination of its grids once, with the changes of a scale."""

from pathlib import Path

import pytest

from groupwise.errors import UserError
from groupwise.sweeps.cells import expand, read_sweep, text

GRIDS = [
    {"task": "cifar", "clip": ["flat", "fixed_layer"], "privacy.epsilon": [3, 8], "seed": [0, 1]},
    {"task": "sst2", "clip": "none", "privacy.epsilon": "inf", "train.epochs": 3},
]


def test_scale_may_have_its_own_seeds() -> None:
    cells = expand(GRIDS, {"mini": {"seed": [0, 5, 6]}}, "mini")
    assert len(cells) == 15 and {cell.seed for cell in cells} == {0, 5, 6}
    assert {cell.name for cell in cells} == {cell.name for cell in expand(GRIDS, {}, "paper")}
    assert len(expand(GRIDS, {"mini": {"seed": [0, 5, 6]}}, "mini", {"seed": ["5"]})) == 5


@pytest.mark.parametrize(
    ("key", "wanted", "number"),
    [
        ("seed", ["0"], 5),  # all grids have it
        ("seed", ["1"], 4),  # the second grid has no seed=1 and is left out
        ("seed", ["7"], 5),  # no grid has it: added to all
        ("task", ["sst2"], 1),
        ("clip", ["flat", "ghost"], 8),  # ghost is added, beside flat
        ("privacy.epsilon", ["3", "8", "inf"], 9),
        ("train.epochs", ["3"], 1),  # the first grid has no such key and is left out
        ("train.epochs", ["5"], 9),
    ],
)
def test_command_line_selects_among_the_cells(key: str, wanted: list[str], number: int) -> None:
    assert len(expand(GRIDS, {}, "paper", {key: wanted})) == number


@pytest.mark.parametrize(
    ("grid", "scale", "words"),
    [
        ({"clip": []}, "paper", "clip has no values"),
        ({"seed": "many"}, "paper", "not a whole number"),
        ({"clip": "flat"}, "mini", "no scale=mini"),
    ],
)
def test_invalid_grid_is_refused(grid: dict, scale: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        expand([grid], {"smoke": {}}, scale)


def test_values_are_written_as_on_the_command_line() -> None:
    values = [None, True, 3, 3.0, 0.25, 1e-5, 0.1234567890123, float("inf"), "flat"]
    assert " ".join(map(text, values)) == "null true 3 3 0.25 1e-05 0.1234567890123 inf flat"


def test_file_is_read_with_its_title_and_hydra_numbers(tmp_path: Path) -> None:
    file = tmp_path / "name.yaml"
    file.write_text("# A title.\n#   a command\ngrids: [{clip.quantile_budget: 1e-4}]")
    sweep = read_sweep(file)
    assert (sweep.name, sweep.title) == ("name", "A title.")
    assert [(cell.name, cell.seed) for cell in sweep.cells("paper")] == [("clip.quantile_budget=0.0001", 0)]


INVALID = (
    *("hydra: [", "seed: 3", "- a list", "scales: {mini: {}}", "", "grids: {task: cifar}", "grids: [flat]"),
    *("grids: [{seed: 1}]\nscales: [mini]", "grids: [{seed: 1}]\nscales: {mini: 3}"),
)


@pytest.mark.parametrize("content", INVALID)
def test_invalid_sweep_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "name.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"name\.yaml"):
        read_sweep(file)
    with pytest.raises(UserError, match=r"no sweep nam \(did you mean name\?\): choose one of name\."):
        read_sweep(tmp_path / "nam.yaml")
    with pytest.raises(UserError, match=r"name\.yaml is not a sweep"):
        read_sweep(tmp_path / "nowhere" / "name.yaml")
