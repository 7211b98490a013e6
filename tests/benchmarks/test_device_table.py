"""`benchmarks.device_table` measures nothing twice, and continues after a lost GPU or the time limit."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import device_table, worker
from benchmarks.device_table import AGAIN, FIRST, LARGEST, LEFT, THEN, TableOptions, measure, measure_largest
from benchmarks.job import Job
from benchmarks.worker import DeviceLost, Together
from tests.benchmarks.stubs import TIMES, answering, row


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Replaces measuring; (workload, dtype, method) of each call."""
    done: list[tuple[str, str, str]] = []

    def run(case: Job, methods: Any, rounds: int, steps: int, limit: float, start: Any, until: Any) -> Any:
        rows = []
        for method in methods:
            done.append((case.workload, case.dtype, method))
            if method == lost.get("method"):
                raise DeviceLost(lost.pop("method"), "an illegal memory access")
            rows.append(row(method, workload=f"{case.workload} (tiny)", dtype=case.dtype))
        return rows

    monkeypatch.setattr(device_table, "run", run)
    lost.clear()
    return done


lost: dict[str, str] = {}


def options(tmp_path: Path, **others: Any) -> TableOptions:
    return TableOptions(out=str(tmp_path), device="cpu", tiny=True, **others)


def test_existing_rows_are_not_measured_again(asked: list[Any], tmp_path: Path) -> None:
    assert measure(options(tmp_path)) == 0
    assert len(asked) == 6 * (len(FIRST) + len(THEN))
    asked.clear()
    assert measure(options(tmp_path)) == 0 and not asked


def test_lost_gpu_becomes_a_row_and_the_next_call_continues(asked: list[Any], tmp_path: Path) -> None:
    lost["method"] = "flat"
    assert measure(options(tmp_path)) == AGAIN
    rows = pd.read_csv(tmp_path / "throughput.csv")
    assert rows["status"].tolist() == ["refused: an illegal memory access"] and rows["method"].tolist() == ["flat"]
    asked.clear()
    assert measure(options(tmp_path)) == 0
    assert [method for _, _, method in asked[:3]] == ["none", "adaptive_layer", "ghost"]


def test_largest_batch_is_found_by_doubling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, tried = {"none": 100, "adaptive_layer": 100, "flat": 64, "ghost": 8}, []

    def answer(job: Job, do: str, steps: int = 0) -> dict[str, Any]:
        if job.batch > fits[job.method]:
            return {"refused": "out of memory"}
        tried.append((job.method, job.batch, do))
        return {"peak_bytes": 8, "batch": job.batch} if do == "measure" else TIMES

    monkeypatch.setattr(device_table, "Together", answering(answer))
    assert measure_largest(options(tmp_path), lambda: len(tried) > 5) == LEFT
    assert measure_largest(options(tmp_path), lambda: False) == 0
    rows = pd.read_csv(tmp_path / LARGEST.file).set_index("method")
    assert rows["batch"].to_dict() == {"none": 64, "adaptive_layer": 64, "flat": 64, "ghost": 16}
    assert rows.loc["none", "examples_per_second"] == 64 and rows.loc["none", "peer"] == "a batch of 128: out of memory"
    assert rows.loc["ghost", "status"] == "refused: out of memory"
    tried.clear()
    assert measure_largest(options(tmp_path), lambda: False) == 0 and not tried


@pytest.mark.usefixtures("few_objects")
def test_failing_synchronize_raises_device_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    here = Together(Job("mlp", "flat", device="cuda", tiny=True), 60.0)
    monkeypatch.setattr(worker, "answer", lambda bench, request: {"seconds": 1.0})
    monkeypatch.setattr(worker, "free_memory", lambda device: None)
    monkeypatch.setattr(worker.torch.cuda, "synchronize", broken)
    with pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access was encountered$") as lost:
        here.ask(do="measure")
    assert lost.value.method == "flat"


@pytest.mark.usefixtures("few_objects")
def test_cublas_workspaces_are_freed_only_after_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of the same process contains their address."""
    freed: list[str] = []
    monkeypatch.setattr(worker, "answer", lambda bench, request: {})
    monkeypatch.setattr(worker.torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("all"), raising=False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(worker.torch.cuda, name, lambda: None)
    with Together(Job("mlp", "flat", device="cuda", tiny=True), 60.0) as here:
        here.ask(do="round", steps=1)
        assert not freed
    assert freed == ["all"]
