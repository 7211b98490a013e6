"""A row of public data is made again to the same bits; one with a secret key, or that changed, is told."""

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
    """Two runs of a sweep, as its committed rows; with their key secret, or public."""
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


def test_a_public_row_is_made_again_and_modes_share_their_batches(world, capsys):
    make, folders = world
    rows = make("data.public: true", runs=2)
    assert {row["plan.private"] for row in rows} == {"False"}
    assert main([rows[0]["hash"][:12], rows[1]["hash"][:8], *folders]) == 0
    told = capsys.readouterr().out
    assert told.count("reproduced, bit for bit") == 2 and "NOT reproduced" not in told
    assert "Not a private release" in " ".join(told.split())
    other = rows[0] | {"valid/accuracy": str(float(rows[0]["valid/accuracy"]) + 1e-9)}
    write_table(Path(folders[1]) / "pair_smoke.csv", [other])
    assert main([rows[0]["hash"], *folders]) == 1
    assert "NOT reproduced" in capsys.readouterr().out


def test_a_secret_key_is_gone(world, capsys):
    make, folders = world
    (row,) = make("")
    assert row["plan.private"] == "True"
    assert main([row["hash"], *folders]) == 2
    assert "had a secret key, which was deleted" in capsys.readouterr().err
    assert main(["abcdef", *folders]) == 2
    assert "no row whose hash begins with 'abcdef'" in capsys.readouterr().err
    Path(folders[3], "pair.yaml").write_text(SWEEP.format(change="train.steps: 3"))
    assert main([row["hash"], *folders]) == 2
    assert "has another configuration today" in capsys.readouterr().err


def test_elsewhere_a_point_is_allowed():
    row = {"valid/accuracy": "50.0", "valid/loss": "1.5", "system.device": "a", "git.sha": "1"}
    near = {"valid/accuracy": 50.9, "valid/loss": 1.54, "system.device": "b", "git.sha": "1"}
    good, lines = compare(row, near)
    assert good and "because of another system.device" in lines[-1]
    assert not compare(row, near | {"valid/loss": 1.56})[0]
    assert not compare(row, near | {"system.device": "a"})[0]
    older = compare(row | {"git.sha": "0123456789"}, near | {"valid/loss": 1.56})[1][-1]
    assert older.startswith("NOT reproduced") and older.endswith(
        "the row is from commit 0123456, and today's code gives other bits, so renew the row"
    )
    good, lines = compare(row, {"valid/loss": 1.54})
    assert not good and lines[0] == "valid/accuracy: 50.0 then, None now"
    with pytest.raises(UserError, match="6 digits"):
        find_row("12", Path("nowhere"))


def test_a_metric_that_is_no_number_is_as_it_was_if_it_is_none_again():
    row = {"test/bleu": "nan", "git.sha": "1"}
    good, lines = compare(row, {"test/bleu": math.nan, "git.sha": "1"})
    assert good and lines[0] == "test/bleu: nan then, nan now"
    assert not compare(row, {"test/bleu": 1.0, "git.sha": "1"})[0]
    assert not compare(row | {"test/bleu": "1.0"}, {"test/bleu": math.nan, "git.sha": "1"})[0]
