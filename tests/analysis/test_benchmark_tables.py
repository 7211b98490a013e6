"""The benchmark tables agree with the CSVs."""

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.workloads import WORKLOADS as KINDS
from groupwise.analysis.benchmark_tables import (
    side_by_side_table,
    small_models_table,
    throughput_summary,
    throughput_tables,
)
from groupwise.analysis.results import Folders
from groupwise.analysis.tables import main

NAMES = ("summary", "small_models", "small_models_gpu", "side_by_side")


def blank(path: Path) -> Path:
    path.write_text("# Page\n" + "".join(f"<!-- begin {name} -->\nold\n<!-- end {name} -->\nkept\n" for name in NAMES))
    return path


def test_throughput_table(throughput):
    text = throughput_tables(throughput)
    assert text.count("**GPT-2 shape, tied, 100 tokens**") == 2  # one thread, two threads
    assert "batch 4, 4 of 12 layers, 3 rounds" in text and "commit `0123456`" in text
    assert "| adaptive per layer | 96.96 | 0.970 [0.960..0.979] | 0.751 | 1.01 | 0.990 | 12.0 |" in text
    assert "| Opacus, ghost | refused: tied weights \\| no | – | – | – | – | – |" in text
    assert text.index("flat, book-keeping") < text.index("flat, ghost")  # in the rows ghost comes first
    fast = throughput_tables(throughput.assign(examples_per_second=21404.4))
    assert "| adaptive per layer | 21,400 |" in fast  # four digits, no exponent


def test_method_that_fails_in_a_later_round_is_shown_as_refused(throughput):
    failed = (throughput["method"] == "ghost") & (throughput["round"] == 1)
    text = throughput_tables(throughput.assign(status=throughput["status"].mask(failed, "refused: out of memory")))
    assert text.count("| flat, ghost | refused: out of memory | – |") == 2  # with one and with two threads
    assert "| flat, book-keeping | refused" not in text


def test_full_depths_are_those_of_the_workloads(throughput):
    for name, kind in KINDS.items():
        if kind.layers is not None:
            found = throughput_tables(throughput.assign(workload=name, layers=kind.layers - 1))
            assert f", {kind.layers - 1} of {kind.layers} layers, " in found
            full_depth = throughput_tables(throughput.assign(workload=name, layers=kind.layers))
            assert f"of {kind.layers} layers" not in full_depth
    assert "SmolLM2-135M shape, 4 of 30 layers, batch 4" in throughput_summary(throughput.assign(workload="llama"))


def test_summary_has_a_line_per_workload_and_machine_and_the_fastest_opacus(throughput):
    slower = throughput[throughput["method"] == "opacus_hooks"].assign(method="opacus_functorch", ratio=0.1)
    text = throughput_summary(pd.concat([throughput, slower]))
    first = "| GPT-2 shape, tied, 100 tokens, 4 of 12 layers, batch 4 | Made-up CPU, 1 thread, float32 | 0.75 | 1.01 |"
    assert first in text
    assert text.count("GPT-2 shape") == 2 and "| 0.10 |" not in text
    assert "| adaptive per layer: speed | memory |" in text
    assert text.splitlines()[2].endswith(" | – | – | – | – | 2.08 × |")
    peer = throughput[throughput["method"] == "opacus_hooks"].assign(method="fastdp_flat", ratio=0.5, peer="fastDP abc")
    both = pd.concat([throughput, peer])
    assert throughput_summary(both).splitlines()[2].endswith("0.45 | 4.00 | – | – | 1.68 × |")
    assert "opacus 1.6.0, fastDP abc;" in throughput_tables(both)


def test_side_by_side_table_has_a_line_per_method_without_the_search(opacus_comparison):
    text = side_by_side_table(opacus_comparison)
    assert "| adaptive per layer, 0.2 | 25 | 95.0 [94.0..96.0] | 7.990 |" in text
    assert "| Opacus, hooks, 0.4 | 40 | 95.0 [94.0..96.0] | 7.990 |" in text and text.count("\n") == 3


@pytest.fixture
def small() -> pd.DataFrame:
    """One model that Opacus refuses."""
    cell = {"model": "lstm", "parameters": 1234, "batch": 64, "device": "cpu", "dtype": "float32"}
    timed = (("opacus_hooks", None, None), ("none", 5.0, 1.0), ("flat", 8.0, 0.625))
    return pd.DataFrame([{**cell, "method": name, "milliseconds": time, "ratio": ratio} for name, time, ratio in timed])


def test_small_models_have_a_line_each_and_show_refusals(small):
    lines = small_models_table(small).splitlines()
    assert lines[0] == "| model | non-private | flat, book-keeping | Opacus, hooks |"
    assert lines[2] == "| lstm, 1,234 parameters, batch 64 | 5.00 | 8.00 (0.62) | refused |"


def test_page_is_filled_between_its_markers(tmp_path, throughput, opacus_comparison, small):
    prose, measured = blank(tmp_path / "benchmarks.md"), tmp_path / "benchmarks"
    tables = tmp_path / "tables" / "benchmarks.md"
    measured.mkdir()
    command, folders = ["benchmarks", "--docs", str(tmp_path), "--out", str(tables.parent)], Folders(measured=tmp_path)
    assert main(command, folders) == 0
    text = prose.read_text()
    assert text.count("Not measured yet.") == text.count("kept") == len(NAMES) and "old" not in text
    assert tables.read_text().count("Not measured yet.") == 1
    parts = {"throughput": throughput, "opacus_side_by_side": opacus_comparison}
    for name, rows in (parts | {"small_models": small}).items():
        rows.to_csv(measured / f"{name}.csv", index=False)
    assert main(command, folders) == 0
    text = prose.read_text()
    assert "Not measured yet." not in text + tables.read_text()
    assert throughput_summary(pd.read_csv(measured / "throughput.csv")) in text
    assert throughput_tables(pd.read_csv(measured / "throughput.csv")) in tables.read_text()
    assert main(command, folders) == 0 and prose.read_text() == text
