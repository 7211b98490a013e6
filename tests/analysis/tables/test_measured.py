"""Faulty rows are refused in one sentence; missing seeds and uncommitted changes are flagged."""

import re

import pandas as pd
import pytest

from groupwise.analysis.results import cost_of, matching
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import main
from groupwise.errors import UserError

NAME = "fixed_per_layer"


def refusal(world, rows=None, scale="mini") -> str:
    if rows is not None:
        world.write(rows, NAME, scale)
    with pytest.raises(UserError) as caught:
        table_lines(NAME, world.folders)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_cost_counts_each_run_once_and_threads_as_cores():
    def row(name: str, seconds: str, threads: str = "1", device: str = "cpu") -> dict[str, str]:
        kind = {"system.device_type": device, "system.threads": threads}
        return {"hash": name, "system.wall_seconds": seconds, **kind}

    assert cost_of([row("a", "3600"), row("a", "3600"), row("b", "1800", "2")]) == ", 2.0 core-hours"
    assert cost_of([row("a", "3600"), row("b", "7200", "16", "cuda")]) == ", 1.0 core-hours, 2.0 hours of GPUs"
    assert cost_of([row("a", "3600"), row("b", "")]) == cost_of([]) == cost_of([{"hash": "a"}]) == ""


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("valid/accuracy", value) for value in ("nan", "inf", "")),
        *(("scale", "paper"), ("sweep", "cifar"), ("seed", 7), ("seed", "x")),
        ("cell", "clip=ghost privacy.epsilon=3 task=cifar"),
    ],
)
def test_invalid_value_is_refused(world, column, value):
    words = "is not a cell and seed of the sweep fixed_per_layer at scale=mini"
    words = "has a valid/accuracy that is not a finite number" if column == "valid/accuracy" else words
    rows = world.rows(NAME).astype({column: object})
    rows.loc[0, column] = value
    assert words in refusal(world, rows)


@pytest.mark.parametrize("column", ["cell", "seed", "hash", "git.sha", "valid/accuracy"])
def test_missing_column_is_refused(world, column):
    assert re.search(f"has no (column ')?{column}", refusal(world, world.rows(NAME).drop(columns=column)))


def test_run_in_two_rows_is_refused(world):
    rows = world.rows(NAME)
    rows.loc[1, "hash"] = rows.loc[0, "hash"]
    assert "the hash of another row" in refusal(world, rows)


def test_repeated_cell_and_seed_is_refused(world):
    rows = world.rows(NAME)
    twin = rows.iloc[[5]].assign(hash="f" * 64, **{"valid/accuracy": 99.0})
    sentence = refusal(world, pd.concat([rows, twin]))
    assert "seed=2 is there twice" in sentence


def test_truncated_file_is_refused(world):
    path = world.write(world.rows(NAME), NAME)
    text = path.read_text()
    path.write_text(text[:-30])
    assert "a line has more or fewer values than columns" in refusal(world)
    path.write_text(text + "a," * 20 + "\n")
    assert "a line has more or fewer values than columns" in refusal(world)
    path.write_text(text.splitlines()[0] + "\n")
    assert "has no rows" in refusal(world)


def test_missing_seed_is_flagged_and_counted(world):
    world.write(world.rows(NAME).drop(index=7), NAME)
    line = table_lines(NAME, world.folders).iloc[0]
    assert (line["n"], line["expected"]) == (2, 3)
    assert line["flags"] == "2 of 3 seeds, without 1"


def test_uncommitted_changes_are_flagged(world):
    rows = world.rows(NAME).astype({"git.dirty": object})
    rows.loc[[6, 7], "git.dirty"] = True
    rows.loc[8, ["git.sha", "git.dirty"]] = None
    world.write(rows, NAME)
    flags = table_lines(NAME, world.folders).iloc[0]["flags"]
    assert "2 of 3 runs with uncommitted changes" in flags
    assert "1 of 3 runs without a known commit" in flags


def test_command_reports_the_error_and_writes_other_tables(world, tmp_path, capsys):
    world.write(world.rows(NAME).assign(hash="x"), NAME)
    world.write(world.rows("adaptivity"), "adaptivity")
    assert main([NAME, "adaptivity", "--out", str(tmp_path / "out")], world.folders) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == ["adaptivity"] * 3


def test_settings_select_cells():
    cells = ["clip=flat privacy.epsilon=3 task=cifar", "clip=flat privacy.epsilon=30 task=cifar"]
    assert matching("task=cifar privacy.epsilon=3", cells) == cells[:1]
