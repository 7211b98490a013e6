"""No norm formula under-states a norm, or exceeds a threshold, by more than a share of 1e-6."""

import csv
from dataclasses import replace

import pytest

from groupwise.clipping import precision as base
from trust.norms import __main__ as norms
from trust.norms.__main__ import ALLOWED, CASES, LARGEST, LAWS, RESULT, Row, main, measure


@pytest.mark.parametrize("name", CASES)
def test_every_formula_is_within_the_tolerance(name: str) -> None:
    for law in ("one spike", "all equal"):
        row = measure(name, law, 1_000_000)
        assert row.good, row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Linear: gradients", "no rule: a copy for each example"])
def test_layer_with_a_hundred_million_parameters(name: str) -> None:
    row = measure(name, "all equal", LARGEST)
    assert row.entries > 0.99 * LARGEST and row.good, row


def test_under_stated_norm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = base.squared_row_norms
    monkeypatch.setattr(base, "squared_row_norms", lambda rows: real(rows) * (1 - 6e-6))
    row = measure("no rule: a copy for each example", "normal", 1000)
    assert not row.good
    assert row.understated == pytest.approx(3e-6, rel=0.2) and row.over_threshold == pytest.approx(3e-6, rel=0.2)


def test_command_writes_only_complete_tables(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(norms, "RESULT", tmp_path / "norms.csv")
    monkeypatch.setattr(norms, "CASES", {"LayerNorm": replace(CASES["LayerNorm"], entries=(1000, 4000))})
    assert main(["--most", "2000"]) == 0 and not norms.RESULT.exists()
    assert len(capsys.readouterr().out.splitlines()) == len(LAWS)
    assert main([]) == 0
    assert len(norms.RESULT.read_text().splitlines()) == 1 + 2 * len(LAWS)
    monkeypatch.setattr(norms, "measure", lambda name, law, entries: Row(entries, 0.0, 2e-6))
    assert main([]) == 1


def test_committed_table_has_every_case_within_the_tolerance() -> None:
    with RESULT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["formula"], row["law"]) for row in rows} == {(name, law) for name in CASES for law in LAWS}
    assert all(max(float(row["understated"]), float(row["over_threshold"])) <= ALLOWED for row in rows)
    assert max(int(row["entries"]) for row in rows) > 0.99 * LARGEST
