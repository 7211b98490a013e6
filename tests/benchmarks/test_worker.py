"""The worker answers requests with measured numbers, or with a refusal after an error."""

import pytest
import torch

from benchmarks.job import Job
from benchmarks.meters import peak_bytes
from benchmarks.worker import Bench, answer


def test_measure_and_round_return_their_numbers() -> None:
    bench = Bench(Job("mlp", "flat", tiny=True))
    facts = answer(bench, {"do": "measure"})
    assert facts["parameters"] == 650 and facts["batch"] == 4 and facts["layers"] is None
    assert facts["peak_bytes"] > 2 * 4 * 650 and facts["flops"] > 0 and facts["sums"] > 0
    taken = answer(bench, {"do": "round", "steps": 2})
    assert set(taken) == {"cpu_seconds", "wall_seconds", "noise_seconds"}
    assert all(seconds > 0 for seconds in taken.values())


def test_peak_memory_is_that_of_the_second_step() -> None:
    megabytes = iter([16, 2])
    peak, _ = peak_bytes(lambda: lambda: torch.empty(next(megabytes) << 20, dtype=torch.uint8), "cpu")
    assert peak == pytest.approx(2 << 20, rel=1e-3)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotImplementedError("Parameter tying is not supported\nat all"), "Parameter tying is not supported"),
        (ValueError(), "ValueError"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    ],
)
def test_exception_becomes_a_refusal(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Bench, "measure", fail)
    assert answer(Bench(Job("mlp", "flat")), {"do": "measure"}) == {"refused": words}
