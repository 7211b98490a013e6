"""A step that runs out of memory is repeated with smaller microbatches, and gives the same update."""

import gc
import math
import mmap
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.errors import UserError
from groupwise.training import memory
from groupwise.training.memory import choose_microbatch, is_oom, oom_as_user_error
from groupwise.training.provenance import peak_memory_bytes, reset_peak_memory
from tests.forks import Command
from tests.tiny_training import ADAPTIVE_BLOCK, ADAPTIVE_LAYER, FLAT, GHOST, NONE
from tests.training.test_step import STEPS, make_trainer


def _after(error: Exception, first: Exception) -> Exception:
    error.__context__ = first
    return error


ERRORS = {
    "GPU": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "CPU": lambda: RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: 64 bytes."),
    "oneDNN": lambda: RuntimeError("could not create a primitive"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "CUDA": lambda: RuntimeError("CUDA error: out of memory"),
    "NumPy": MemoryError,
    "a recording": lambda: _after(RuntimeError("capture failed"), torch.OutOfMemoryError("CUDA out of memory.")),
}
MODES = (NONE, FLAT, GHOST, ADAPTIVE_LAYER, ADAPTIVE_BLOCK)


class FailingOnce(TorchDispatchMode):
    """Raises once, at operation number `at`; counts all operations."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.seen = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise self.error()
        return func(*args, **(kwargs or {}))


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()])


def sums_of_the_first_batch(trainer: Any) -> None:
    trainer.private.sums.add(trainer.private, 0, trainer.private.sampler.indices(0))


def trained(clip: Any, microbatch: int, at: int = 0, kind: str = "CPU") -> tuple[Any, int]:
    """A trainer after all steps, of which the first fails once at operation `at`; and that step's operations."""
    trainer = make_trainer(clip, microbatch=microbatch)
    failing = FailingOnce(at, ERRORS[kind])
    add = trainer.private.sums.add

    def within(*given: Any) -> torch.Tensor:
        with failing:
            return add(*given)

    trainer.private.sums.add = within
    trainer.step(0)
    trainer.private.sums.add = add
    for step in range(1, STEPS):
        trainer.step(step)
    return trainer, failing.seen


@pytest.mark.parametrize("clip", MODES, ids=lambda clip: clip.name)
def test_running_out_of_memory_anywhere_gives_the_update_of_half_the_microbatch(clip, capsys):
    half, _ = trained(clip, 8)
    _, operations = trained(clip, 16)
    for at in range(1, operations, max(1, operations // 6)):
        retried, _ = trained(clip, 16, at)
        assert retried.private.sums.size == 8
        assert torch.equal(weights(retried), weights(half))
        if half.private.thresholds is not None:
            assert torch.equal(retried.private.thresholds.clip_thresholds, half.private.thresholds.clip_thresholds)
        assert capsys.readouterr().err == "warning: memory ran out; continuing with 8 examples at once.\n"


@pytest.mark.parametrize("kind", ERRORS)
def test_every_allocators_error_is_recognised(kind):
    retried, _ = trained(FLAT, 16, 20, kind)
    assert retried.private.sums.size == 8


def test_dropout_is_that_of_half_the_microbatch_from_the_beginning():
    ends = []
    for microbatch, at in ((8, 0), (16, 30)):
        trainer = make_trainer(FLAT, microbatch=microbatch)
        losses = trainer.task.losses
        trainer.task.losses = lambda *given, losses=losses: (values := losses(*given)) * torch.rand(len(values))
        with FailingOnce(at, ERRORS["CPU"]):
            sums_of_the_first_batch(trainer)
        ends.append([p.grad.clone() for p in trainer.task.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_other_errors_are_not_retried():
    trainer = make_trainer(FLAT)
    with FailingOnce(10, lambda: RuntimeError("a bug")), pytest.raises(RuntimeError, match="a bug"):
        sums_of_the_first_batch(trainer)
    assert trainer.private.sums.size == 64


@pytest.mark.usefixtures("few_objects")
def test_a_microbatch_that_did_not_fit_leaves_no_tensors():
    trainer = make_trainer(ADAPTIVE_BLOCK, microbatch=16)
    gc.collect()
    with FailingOnce(60, ERRORS["CPU"]):
        trainer.private.sums.add(trainer.private, 0, np.arange(0))
        before = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        sums_of_the_first_batch(trainer)
    assert trainer.private.sums.size == 8
    trainer.private.clear()
    gc.collect()
    assert sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()) <= before + 2 * len(
        trainer.private.trainable
    )


def test_running_out_of_memory_outside_of_a_step_is_one_sentence():
    with pytest.raises(UserError, match=r"lower train\.microbatch, eval\.batch_size"), oom_as_user_error():
        raise ERRORS["GPU"]()
    with pytest.raises(RuntimeError, match="a bug"), oom_as_user_error():
        raise RuntimeError("a bug")
    assert not is_oom(ValueError("DefaultCPUAllocator"))


def test_an_evaluation_out_of_memory_continues_with_half_the_batch(capsys):
    trainer, asked = make_trainer(NONE), []

    def evaluate(split: str, batch_size: int, limit: int | None, final: bool) -> dict[str, float]:
        asked.append(batch_size)
        if batch_size > 3:
            raise ERRORS["CPU"]()
        return {"loss": 0.0}

    trainer.task.evaluate = evaluate
    assert trainer.evaluate("valid", 12) == {"loss": 0.0} and asked == [12, 6, 3]
    assert capsys.readouterr().err.endswith("warning: memory ran out; evaluating with 3 examples at once.\n")
    trainer.task.evaluate = lambda split, batch_size, limit, final: evaluate(split, 4, limit, final)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer.evaluate("valid", 2)


def losses_of(width: int):
    model, x = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)), torch.randn(1024, 8)
    return model, lambda examples: model(x[list(examples)]).square().sum(1)


def chosen(width: int, most: int = 1024) -> int:
    model, losses = losses_of(width)
    return choose_microbatch(losses, model, torch.device("cpu"), np.arange(most))


def test_a_chosen_microbatch_is_a_power_of_two_within_the_limits(monkeypatch):
    monkeypatch.setattr(memory, "CPU_BUDGET", 1 << 20)
    sizes = [chosen(width) for width in (16, 1024, 8192, 1 << 20)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] >= sizes[3] == 1
    assert all(size & (size - 1) == 0 for size in sizes)
    assert chosen(16, most=100) == 64


def test_copies_of_weights_under_autocast_do_not_count_as_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPU_BUDGET", 1 << 20)
    model, x = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512)), torch.randn(1024, 8)

    def losses(rows: Any) -> torch.Tensor:
        return model(x[list(rows)]).square().sum(1)

    def autocast(rows: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(rows).float()

    sizes = [choose_microbatch(each, model, torch.device("cpu"), np.arange(1024)) for each in (losses, autocast)]
    assert sizes[0] <= sizes[1] <= 2 * sizes[0]


@pytest.mark.parametrize(
    ("size", "batch_size"), [(256, 256.0), (256, 1024.0), (64, 61.5), (16, 256.0), (256, 20.0), (1, 3.0)]
)
def test_nearly_every_batch_needs_as_few_microbatches_as_one_of_the_expected_size(size: int, batch_size: float) -> None:
    chosen = memory.fill_evenly(size, batch_size)
    batches = np.random.default_rng(0).binomial(100_000, batch_size / 100_000, 2_000)
    assert np.mean(np.ceil(batches / chosen) <= np.ceil(batch_size / size)) > 0.99
    assert chosen <= size * (1 + 4 / math.sqrt(batch_size)) + 1


def test_choosing_a_microbatch_leaves_the_generator_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    drop = nn.Dropout(0.5)
    (model, losses), x = losses_of(16), torch.randn(4, requires_grad=True)
    torch.manual_seed(3)
    choose_microbatch(lambda rows: drop(losses(rows)) + x[: len(rows)], model, torch.device("cpu"), np.arange(64))
    assert torch.equal(torch.rand(1), expected)


def test_a_gpus_budget_is_a_share_of_its_memory_without_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    total = SimpleNamespace(total_memory=1_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)  # not used: free memory differs between runs
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    device = torch.device("cuda", 0)
    assert memory.gpu_budget(model, device) == pytest.approx(0.6 * (1_000_000 - 2 * 4 * 40_000))
    model[0].requires_grad_(False)
    assert memory.gpu_budget(model, device) == pytest.approx(0.6 * (1_000_000 - 5 * 40_000))
    total.total_memory = 10
    assert memory.gpu_budget(model, device) == 0


def printed(folder: Path, script: str, *words: str) -> list[str]:
    """The words that a script prints in a new process."""
    (folder / "script.py").write_text(script)
    code, output, errors = Command(str(folder / "script.py"), *words, cwd=folder).finish()
    assert code == 0, errors
    return output.split()


FAULTS = """
import resource, sys
import torch
from groupwise.training.memory import keep_freed_blocks

kept = sys.argv[1] == "kept" and keep_freed_blocks()
for turn in range(12):
    if turn == 10:  # the first turns still grow the heap
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(9 << 20), torch.ones(12 << 20), torch.ones(10 << 20)]
    del held
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt needs glibc")
def test_keep_freed_blocks_avoids_page_faults(tmp_path: Path):
    pages = 2 * (124 << 20) // resource.getpagesize()
    kept, count = printed(tmp_path, FAULTS, "kept")
    assert kept == "True" and int(count) == pytest.approx(0, abs=pages // 100)
    kept, count = printed(tmp_path, FAULTS, "as it is")
    assert kept == "False" and int(count) > pages // 100, "otherwise keep_freed_blocks is useless"


GROWTH = """
import torch
from groupwise.training.memory import keep_freed_blocks, return_freed_memory

def held():
    return int(open("/proc/self/statm").read().split()[1])

keep_freed_blocks()
before, small = held(), []
for size in range(40):  # a small block behind each keeps it from the heap's end
    block = torch.ones((4 << 20) + (size << 16))
    small.append(bytes(100_000))
    del block
grown = held() - before
return_freed_memory()
print(grown, held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt needs glibc")
def test_return_freed_memory_returns_gaps_between_blocks(tmp_path: Path):
    grown, left = map(int, printed(tmp_path, GROWTH))
    assert grown > 4 * max(left, 1)


def test_peak_memory_is_that_of_the_run_and_not_of_the_process():
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not reset the peak")
    with mmap.mmap(-1, 1 << 26) as held:  # whose memory returns to the system, whatever the allocator keeps
        np.frombuffer(held, np.uint8).fill(1)
        before = peak_memory_bytes(torch.device("cpu"))
    reset_peak_memory(torch.device("cpu"))
    assert peak_memory_bytes(torch.device("cpu")) < before - (1 << 25)
