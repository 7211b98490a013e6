"""A row on public data is reproduced bit for bit; a row with a secret key or other bits is reported."""

import math
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.rows import read_table, write_table
from groupwise.run import run
from groupwise.sweeps.cells import read_sweep
from groupwise.sweeps.reproduce import compare, find_row, main

CONF = Path(__file__).resolve().parents[2] / "conf"
SWEEP = """# A sweep.
grids:
  - {{task: cifar, clip: [flat, adaptive_layer], train.steps: 2, seed: [0]}}
scales:
  smoke: {{{change}}}
"""


@pytest.fixture
def world(tmp_path):
    """A function that runs cells of a sweep and writes their rows, and options for these folders."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "measured").mkdir()

    def make(change: str, runs: int = 1):
        (tmp_path / "sweeps" / "pair.yaml").write_text(SWEEP.format(change=change))
        rows = []
        for cell in read_sweep(tmp_path / "sweeps" / "pair.yaml").cells("smoke")[:runs]:
            row = run(compose_run([*cell.overrides, f"paths.results={tmp_path}"], CONF))
            first = {"sweep": "pair", "cell": cell.name, "seed": "0", "scale": "smoke"}
            rows.append({**row, **first})
        write_table(tmp_path / "measured" / "pair_smoke.csv", rows)
        return read_table(tmp_path / "measured" / "pair_smoke.csv")

    folders = ["--measured", str(tmp_path / "measured"), "--sweeps", str(tmp_path / "sweeps"), "--conf", str(CONF)]
    return make, folders


def test_public_rows_are_reproduced_bit_for_bit(world, capsys):
    make, folders = world
    rows = make("data.public: true", runs=2)
    assert {row["plan.private"] for row in rows} == {"False"}
    assert main([rows[0]["hash"][:12], rows[1]["hash"][:8], *folders]) == 0
    printed = capsys.readouterr().out
    assert printed.count("reproduced, bit for bit") == 2 and "NOT reproduced" not in printed
    assert "Not a private release" in " ".join(printed.split())
    other = rows[0] | {"valid/accuracy": str(float(rows[0]["valid/accuracy"]) + 1e-9)}
    write_table(Path(folders[1]) / "pair_smoke.csv", [other])
    assert main([rows[0]["hash"], *folders]) == 1
    assert "NOT reproduced" in capsys.readouterr().out


def test_rows_of_several_processes_are_reproduced_in_as_many(world, monkeypatch):
    make, folders = world
    (row,) = make("data.public: true, parallel.ranks: 2")
    asked = []
    monkeypatch.setattr("groupwise.processes.start.spawn", lambda config: asked.append(config) or row)
    main([row["hash"], *folders])
    assert [config.parallel.ranks for config in asked] == [2]


def test_row_with_a_deleted_key_is_refused(world, capsys):
    make, folders = world
    (row,) = make("")
    assert row["plan.private"] == "True"
    assert main([row["hash"], *folders]) == 2
    assert "had a secret key, which was deleted" in capsys.readouterr().err
    assert main(["abcdef", *folders]) == 2
    assert "no row whose hash begins with 'abcdef'" in capsys.readouterr().err
    Path(folders[3], "pair.yaml").write_text(SWEEP.format(change="train.steps: 3"))
    assert main([row["hash"], *folders]) == 2
    assert "now has another configuration" in capsys.readouterr().err


def test_one_point_is_allowed_on_another_machine():
    row = {"valid/accuracy": "50.0", "valid/loss": "1.5", "system.device": "a", "git.sha": "1"}
    near = {"valid/accuracy": 50.9, "valid/loss": 1.54, "system.device": "b", "git.sha": "1"}
    good, lines = compare(row, near)
    assert good and "because of another system.device" in lines[-1]
    same_bits = near | {"valid/accuracy": 50.0, "valid/loss": 1.5}
    assert compare(row, same_bits)[1][-1] == "reproduced, bit for bit"
    assert not compare(row, near | {"valid/loss": 1.56})[0]
    assert not compare(row, near | {"system.device": "a"})[0]
    older = compare(row | {"git.sha": "0123456789"}, near | {"valid/loss": 1.56})[1][-1]
    assert older.startswith("NOT reproduced") and older.endswith(
        "the row is from commit 0123456, and this code gives other bits: run the cell again"
    )
    good, lines = compare(row, {"valid/loss": 1.54})
    assert not good and lines[0] == "valid/accuracy: 50.0 then, None now"
    with pytest.raises(UserError, match="6 digits"):
        find_row("12", Path("nowhere"))


def test_nan_metric_matches_only_nan():
    row = {"test/bleu": "nan", "git.sha": "1"}
    good, lines = compare(row, {"test/bleu": math.nan, "git.sha": "1"})
    assert good and lines[0] == "test/bleu: nan then, nan now"
    assert not compare(row, {"test/bleu": 1.0, "git.sha": "1"})[0]
    assert not compare(row | {"test/bleu": "1.0"}, {"test/bleu": math.nan, "git.sha": "1"})[0]
