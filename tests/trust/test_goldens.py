"""`trust.goldens` names each frozen value that differs from the current one by more than its tolerance."""

import json
from pathlib import Path

import pytest

from trust import goldens
from trust.goldens import DIFFERENT, MOVED, PARTS, RESULT, RUNS, SAME, judge, main

SMALL = {"one step": (1000, 1000, 1, 1e-5, 1.0, 1, 0.0), "two steps": (1000, 1000, 2, 1e-5, 1.0, 4, 0.1)}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Frozen values of two plans and of an architecture."""
    monkeypatch.setattr(goldens, "PLANS", SMALL)
    monkeypatch.setattr(goldens, "RESULT", tmp_path / "goldens.json")
    monkeypatch.setitem(PARTS, "architectures", lambda: {"torch: GRU, flat": "exact"})
    assert main(["freeze", "plans", "architectures"]) == 0
    return tmp_path / "goldens.json"


def change(file: Path, part: str, name: str, value: float | str) -> None:
    frozen = json.loads(file.read_text())
    frozen[part][name] = value
    file.write_text(json.dumps(frozen))


def test_unchanged_values_compare_as_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans", "architectures"]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("plans: 12 compared, 0 not frozen, worst difference 0, 0 not the same")
    assert lines[1].startswith("architectures: 1 compared")


def test_changed_value_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "two steps: sigma_new"
    frozen = json.loads(file.read_text())["plans"][name]
    change(file, "plans", name, frozen * 1.0005)
    assert main(["plans"]) == 0 and "worst difference 0.0005" in capsys.readouterr().out
    change(file, "plans", name, frozen * 1.002)
    assert main(["plans"]) == main(["plans", "--allow-moved"]) == 1
    assert f"different: {name}: {frozen * 1.002} frozen, {frozen} now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "name", "then", "now", "verdict"),
    [
        ("hashes", "a row", "0123", "4567", DIFFERENT),
        ("noise", "a plan", 1.0, "1, where a row has 2", DIFFERENT),
        ("architectures", "GRU", "refused", "exact", SAME),
        ("architectures", "GRU", "exact", "refused", DIFFERENT),
        ("runs", "flat: weights", "0123", "4567", MOVED),
        ("runs", "flat: weights", "0123", None, DIFFERENT),
        ("runs", "flat: valid/accuracy", 80.0, 80.9, MOVED),
        ("runs", "flat: valid/accuracy", 80.0, 78.9, DIFFERENT),
        ("runs", "flat: valid/loss", 1.0, 1.1, DIFFERENT),
        ("runs", "flat: epsilon", 8.0, 8.001, SAME),
        ("runs", "flat: epsilon", 8.0, 8.1, DIFFERENT),
        ("runs", "none: epsilon", "inf", 8.0, DIFFERENT),
    ],
)
def test_verdicts(part: str, name: str, then: float | str, now: float | str | None, verdict: str) -> None:
    assert judge(part, name, then, now) == verdict


def test_allow_moved_accepts_other_bits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "runs", lambda: {"flat: weights": "0123", "flat: epsilon": 8.0})
    monkeypatch.setattr(goldens, "RUNS", {"flat": ()})
    assert main(["freeze", "runs"]) == main(["runs"]) == 0
    change(file, "runs", "flat: weights", "4567")
    assert main(["runs"]) == 1 and main(["runs", "--allow-moved"]) == 0


def test_freeze_loses_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()
    monkeypatch.setitem(PARTS, "resumption", lambda: {"killed and resumed": "other bits"})
    monkeypatch.setitem(PARTS, "runs", lambda: {"flat: weights": "0123"})
    assert main(["freeze", "plans", "resumption"]) == main(["freeze", "plans", "runs"]) == 1
    assert file.read_text() == before
    monkeypatch.setitem(PARTS, "architectures", lambda: {"torch: LSTM, flat": "exact"})
    assert main(["freeze", "architectures"]) == 0
    assert set(json.loads(file.read_text())["architectures"]) == {"torch: GRU, flat", "torch: LSTM, flat"}


def test_unfrozen_or_unknown_part_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "resumption", lambda: {"killed and resumed": "same bits"})
    assert main(["resumption"]) == 2 and "has no resumption" in capsys.readouterr().err
    assert main(["plan"]) == 2 and "did you mean plans" in capsys.readouterr().err


def test_committed_file_has_every_part_and_run() -> None:
    frozen = json.loads(RESULT.read_text())
    assert set(frozen) == {*PARTS, "machine"} and all(frozen.values())
    assert {name.partition(":")[0] for name in frozen["runs"]} == set(RUNS)
