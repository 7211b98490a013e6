"""Result rows: ratios within a round, and a file that keeps rows of other measurements."""

from pathlib import Path

import pandas as pd

from benchmarks import results
from benchmarks.results import THROUGHPUT, with_ratios
from tests.benchmarks.stubs import row


def test_ratio_is_to_the_faster_plain_row_of_the_same_round() -> None:
    rows = [
        row(number=0, seconds=2.0),
        row(number=0, seconds=1.0, memory_format="channels_last", peak_bytes=80),
        row(number=1, seconds=2.0),
        row(number=1, seconds=4.0, memory_format="channels_last", peak_bytes=80),
        row("flat", 0, 4.0, peak_bytes=120, flops=100),
        row("flat", 1, 4.0, peak_bytes=120, flops=None),
    ]
    found = with_ratios(rows)
    assert [one["ratio"] for one in found] == [0.5, 1.0, 1.0, 0.5, 0.25, 0.5]
    assert [one["plain_seconds"] for one in found] == [1.0, 1.0, 2.0, 2.0, 1.0, 2.0]
    assert [one["memory_ratio"] for one in found[-2:]] == [1.5, 1.5]  # relative to the smaller peak
    assert [one["floor"] for one in found[-2:]] == [0.5, None]


def test_refused_row_has_no_ratio() -> None:
    found = with_ratios([row(), row("opacus_ghost", seconds=None, peak_bytes=None, flops=None)])[1]
    assert found["plain_seconds"] is found["ratio"] is found["memory_ratio"] is found["floor"] is None


def test_new_rows_replace_only_those_of_the_same_measurement(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "deep"
    first = [row(number=0), row(number=1), row("flat", 0, batch=8), row("flat", 0, layers=4), row("ghost")]
    monkeypatch.setattr(results, "hardware", lambda device: "a processor")
    THROUGHPUT.add(folder, first)
    monkeypatch.setattr(results, "hardware", lambda device: "another")
    THROUGHPUT.add(folder, [row()])
    monkeypatch.setattr(results, "hardware", lambda device: "a processor")
    THROUGHPUT.add(folder, [row(seconds=1 / 3), row("flat", 0, 5.0, memory_format="channels_last", more=1)])
    table = pd.read_csv(folder / "throughput.csv")
    assert table["more"].isna().tolist() == [True] * 5 + [False]
    written = table[["method", "batch", "hardware", "round", "cpu_seconds"]].fillna("").to_records(index=False).tolist()
    assert written == [
        ("flat", 8, "a processor", 0, 2.0),
        ("flat", 4, "a processor", 0, 2.0),
        ("ghost", 4, "a processor", 0, 2.0),
        ("none", 4, "another", 0, 2.0),
        ("none", 4, "a processor", 0, 0.333333),
        ("flat", 4, "a processor", 0, 5.0),
    ]
