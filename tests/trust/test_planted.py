"""Each planted bug has a lower bound above the claimed ε, and the correct code one below it."""

import csv
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from trust.planted_bugs import __main__ as planted
from trust.planted_bugs.__main__ import HEAD, RESULT, as_csv, main, measure
from trust.planted_bugs.cases import CASES

BY_NAME = {case.name: case for case in CASES}
QUICK = {"one_stream": 40, "public_masks": 40, "thresholds_first": 60, "last_microbatch": 60}
"""Plays of some bugs that few plays reveal, for the fast tests; no_noise and no_clipping are in other tests below."""


def check(row):
    assert row.caught and row.sound, row
    if row.true is not None:  # the lower bound is below the true ε
        assert row.planted <= row.true


@pytest.mark.parametrize("name", QUICK)
def test_few_plays_catch_the_bug(name):
    check(measure(BY_NAME[name], QUICK[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in QUICK])
def test_many_plays_catch_the_bug(name):
    check(measure(BY_NAME[name]))


def test_correct_code_is_not_caught():
    row = measure(replace(BY_NAME["no_noise"], plant=nullcontext), 40)
    assert row.sound and not row.caught
    assert ",no," in as_csv([row])


def test_bug_in_the_unpatched_code_is_detected():
    with BY_NAME["no_noise"].plant():
        row = measure(replace(BY_NAME["no_noise"], plant=nullcontext), 40)
    assert not row.sound


def test_replicas_release_the_same_as_one_process():
    worst = BY_NAME["noise_per_rank"].worst
    worst = replace(worst, others=torch.linspace(-2, 2, worst.others.numel()).double().view_as(worst.others))
    one, three = (replace(worst, replicas=replicas).worlds(1.0, 1e-5, 0)[1] for replicas in (1, 3))
    assert three() == pytest.approx(one(), rel=1e-9)
    with BY_NAME["noise_per_rank"].plant():
        assert three() != pytest.approx(one(), rel=1e-3)


def test_patches_are_undone():
    before = {name: measure(BY_NAME[name], 8).correct for name in ("no_clipping", "mean_loss")}
    assert before == {name: measure(BY_NAME[name], 8).correct for name in before}


def test_command_writes_only_complete_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planted, "RESULT", tmp_path / "planted.csv")
    assert main(["--only", "no_clipping", "--plays", "30"]) == 0
    assert "| no clipping | 1 |" in capsys.readouterr().out and not planted.RESULT.exists()
    assert main(["--only", "no_clipping", "--plays", "2"]) == 1  # too few to reveal the bug
    assert "no_clipping: at least" in capsys.readouterr().err
    monkeypatch.setattr(planted, "CASES", (replace(BY_NAME["no_clipping"], plays=30),))
    assert main([]) == 0
    assert len(planted.RESULT.read_text().splitlines()) == 2
    monkeypatch.setattr(planted, "CASES", [replace(BY_NAME[name], plays=30) for name in ("mean_loss", "no_clipping")])
    (before,) = planted.RESULT.read_text().splitlines()[1:]
    assert main(["--only", "mean_loss"]) == 0  # rows of other bugs are kept
    assert [line[:9] for line in planted.RESULT.read_text().splitlines()[1:]] == ["mean_loss", before[:9]]
    with pytest.raises(SystemExit, match="2"):
        main(["--plays", "1"])


def test_committed_table_has_every_bug_caught():
    with RESULT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == HEAD and [row["name"] for row in rows] == sorted(BY_NAME)
    for row in rows:
        assert row["caught"] == "yes"
        assert float(row["correct_epsilon"]) <= float(row["claimed_epsilon"]) < float(row["bug_epsilon"])
        assert int(row["plays"]) == BY_NAME[row["name"]].plays
