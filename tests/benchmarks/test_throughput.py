"""`benchmarks.throughput` prints and writes its rows, and keeps finished ones when interrupted."""

from pathlib import Path

import pandas as pd
import pytest

from benchmarks import throughput
from benchmarks.throughput import main
from tests.benchmarks.stubs import row


@pytest.mark.slow  # processes and driver have their own fast tests
def test_two_methods_on_the_smallest_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiny=true", "workload=mlp", "method=flat", "rounds=2", "steps=1", f"out={tmp_path}"]
    assert main(arguments) == 0
    printed, progress = capsys.readouterr()
    assert [line.split()[4] for line in printed.splitlines()] == ["memory_format", "none", "flat"]
    assert "round 2 of 2" in progress
    rows = pd.read_csv(tmp_path / "throughput.csv")
    assert rows["method"].tolist() == ["none", "flat", "none", "flat"]
    assert (rows["status"] == "ok").all() and (rows["ratio"] > 0).all() and (rows["memory_ratio"] >= 1).all()


def test_interruption_keeps_finished_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def run(case, *_: object) -> list[dict]:
        if done:
            raise KeyboardInterrupt
        done.append(case.workload)
        return [row(workload=case.workload)]

    monkeypatch.setattr(throughput, "run", run)
    assert main(["workload=mlp,gpt2", f"out={tmp_path}"]) == 130
    assert pd.read_csv(tmp_path / "throughput.csv")["workload"].tolist() == ["mlp"]
    assert "mlp" in capsys.readouterr().out
