"""`benchmarks.device_steps` continues where it stopped, and after a combination that breaks the GPU."""

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device_steps
from benchmarks.device_steps import TABLE, StepOptions
from benchmarks.device_steps import measure as run
from benchmarks.device_table import AGAIN, LEFT
from benchmarks.job import Job


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The combinations that were measured; the first breaks the GPU."""
    seen: list[tuple[str, int]] = []

    def row(job: Job, precision: str, options: Any) -> dict[str, Any]:
        seen.append((job.named, job.batch))
        found = {"workload": job.named, "microbatch": job.batch, "precision": precision, "layout": job.memory_format}
        return found | {"method": job.method, "device": options.device, "status": "refused: a kernel failed"}

    monkeypatch.setattr(device_steps, "step_row", row)
    monkeypatch.setattr(device_steps, "is_lost", lambda device: len(seen) == 1)
    return seen


def options(out: Path, **more: Any) -> StepOptions:
    few = {"microbatch": "2,4", "precision": "float32", "layout": "contiguous"}
    return StepOptions(out=str(out), device="cpu", **{**few, **more})


def test_repeated_calls_measure_each_combination_once(tmp_path: Path, asked: list[tuple[str, int]]) -> None:
    assert run(options(tmp_path)) == AGAIN
    assert run(options(tmp_path, limit=1e-9)) == LEFT
    assert run(options(tmp_path)) == 0 and run(options(tmp_path)) == 0
    assert asked == [("wrn16_4_ws", 2), ("wrn16_4_ws", 4)]
    with (tmp_path / TABLE.file).open(newline="") as lines:
        assert [row["status"] for row in csv.DictReader(lines)] == ["refused: a kernel failed"] * 2
