"""Rows at fault are refused in one sentence, and what is merely odd is flagged; nothing is averaged in silence."""

import pandas as pd
import pytest

from groupwise.analysis.results import cost_of, matching, read_measured
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import main
from groupwise.errors import UserError
from groupwise.sweeps.cells import read_sweep

NAME = "fixed_per_layer"


def refusal(world, rows=None, scale="mini") -> str:
    if rows is not None:
        world.write(rows, NAME, scale)
    with pytest.raises(UserError) as caught:
        table_lines(NAME, world.folders)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_a_cost_counts_each_run_once_and_threads_as_cores():
    def row(name: str, seconds: str, threads: str = "1", device: str = "cpu") -> dict[str, str]:
        kind = {"system.device_type": device, "system.threads": threads}
        return {"hash": name, "system.wall_seconds": seconds, **kind}

    assert cost_of([row("a", "3600"), row("a", "3600"), row("b", "1800", "2")]) == ", 2.0 core-hours"
    assert cost_of([row("a", "3600"), row("b", "7200", "16", "cuda")]) == ", 1.0 core-hours, 2.0 hours of GPUs"
    assert cost_of([row("a", "3600"), row("b", "")]) == cost_of([]) == cost_of([{"hash": "a"}]) == ""


def test_sound_rows_are_read_in_any_order(world):
    rows = world.rows(NAME)
    world.write(rows.sample(frac=1, random_state=0), NAME)
    sweep = read_sweep(world.folders.sweeps / f"{NAME}.yaml")
    measured = read_measured(sweep, "mini", world.folders.measured)
    assert len(measured.rows) == len(rows) == 24
    assert measured.rows["seed"].tolist() == [0, 1, 2] * 8
    assert not any(measured.flags_of(cell) for cell in measured.expected)


@pytest.mark.parametrize("value", ["nan", "inf", "", "forty"])
def test_a_metric_that_is_no_finite_number(world, value):
    rows = world.rows(NAME).astype({"valid/accuracy": object})
    rows.loc[4, "valid/accuracy"] = value
    assert f"seed=1 has valid/accuracy='{value}', which is no finite number" in refusal(world, rows)


@pytest.mark.parametrize("column", ["cell", "seed", "scale", "sweep", "hash", "git.sha", "git.dirty"])
def test_a_column_that_is_missing(world, column):
    assert f"has no column '{column}'" in refusal(world, world.rows(NAME).drop(columns=column))


def test_a_metric_that_no_row_has(world):
    assert "has no valid/accuracy" in refusal(world, world.rows(NAME).drop(columns="valid/accuracy"))


@pytest.mark.parametrize("text", ["", "abc", "Z" * 64, "0" * 63])
def test_a_hash_that_is_none(world, text):
    rows = world.rows(NAME)
    rows.loc[0, "hash"] = text
    assert "no SHA-256" in refusal(world, rows)


def test_one_run_in_two_rows(world):
    rows = world.rows(NAME)
    rows.loc[1, "hash"] = rows.loc[0, "hash"]
    assert "the hash of another row" in refusal(world, rows)


def test_a_cell_and_seed_twice(world):
    rows = world.rows(NAME)
    twin = rows.iloc[[5]].assign(hash="f" * 64, **{"valid/accuracy": 99.0})
    sentence = refusal(world, pd.concat([rows, twin]))
    assert "seed=2 is there twice" in sentence


def test_mixed_scales(world):
    rows = world.rows(NAME)
    rows.loc[7, "scale"] = "paper"
    assert "is of scale=paper, in the file of scale=mini" in refusal(world, rows)


def test_another_sweeps_row(world):
    rows = world.rows(NAME)
    rows.loc[7, "sweep"] = "cifar"
    assert "is of sweep=cifar" in refusal(world, rows)


def test_a_cell_that_the_sweep_does_not_have(world):
    rows = world.rows(NAME)
    rows.loc[0, "cell"] = "clip=ghost privacy.epsilon=3 task=cifar"
    assert "clip=ghost" in refusal(world, rows)


@pytest.mark.parametrize(("seed", "words"), [(7, "a seed that the sweep does not have"), ("x", "no whole number")])
def test_a_seed_that_the_sweep_does_not_have(world, seed, words):
    rows = world.rows(NAME).astype({"seed": object})
    rows.loc[0, "seed"] = seed
    assert words in refusal(world, rows)


def test_a_file_that_was_cut_off(world):
    path = world.write(world.rows(NAME), NAME)
    text = path.read_text()
    path.write_text(text[:-30])
    assert "a line has more or fewer values than columns" in refusal(world)
    path.write_text(text + "a," * 20 + "\n")
    assert "a line has more or fewer values than columns" in refusal(world)
    path.write_text("")
    assert "does not parse" in refusal(world)
    path.write_text(text.splitlines()[0] + "\n")
    assert "has no rows" in refusal(world)


def test_a_dirty_column_that_says_nothing(world):
    rows = world.rows(NAME).assign(**{"git.dirty": "perhaps"})
    assert "git.dirty=perhaps" in refusal(world, rows)


def test_a_missing_seed_is_flagged_and_counted(world):
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
    assert "2 of 3 runs with changes that were not committed" in flags
    assert "1 of 3 runs outside of a checkout" in flags


def test_the_command_says_it_and_makes_the_other_tables(world, tmp_path, capsys):
    world.write(world.rows(NAME).assign(hash="x"), NAME)
    world.write(world.rows("adaptivity"), "adaptivity")
    assert main([NAME, "adaptivity", "--out", str(tmp_path / "out"), *world.options()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == ["adaptivity"] * 3


def test_settings_select_cells():
    cells = ["clip=flat privacy.epsilon=3 task=cifar", "clip=flat privacy.epsilon=30 task=cifar"]
    assert matching("task=cifar privacy.epsilon=3", cells) == cells[:1]
    with pytest.raises(UserError, match="KEY=VALUE"):
        matching("task", cells)
