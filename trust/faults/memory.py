"""Memory that runs out in the middle of a step."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trust.faults.process import SEEDED, Outcome, complete, left, run_folder, same

MANY = ("data.train_limit=256", "train.batch_size=128", "train.steps=3", "eval.batch_size=1", "eval.train_limit=4")
AT_ONCE = 128
PER_EXAMPLE = 8 * 8 * 16 * 4
"""Bytes of an example's activations after one of the first layers."""


def halved(trials: int, work: Path, seed: int = 8) -> Outcome:
    """Steps that do not fit: the same batch with fewer examples at a time, and what a run set to that comes to."""
    chance, lost = random.Random(seed), 0
    for trial in range(trials):
        results, fits = work / str(trial), 2 ** chance.randrange(2, 7)
        process = complete(results, *SEEDED, *MANY, f"train.microbatch={AT_ONCE}", before=_limit(fits * PER_EXAMPLE))
        complete(whole := work / f"whole-{trial}", *SEEDED, *MANY, f"train.microbatch={fits}")
        folder = run_folder(results)
        good = process.code == 0 and folder is not None and "memory ran out" in process.errors
        good = good and json.loads((folder / "system.json").read_text())["microbatch"] == fits  # type: ignore[operator]
        lost += not (good and same(results, left(whole)))
    told = "a warning; examples at once halved, same batch and noise: the bits of a run set to that"
    return Outcome("out of memory in a step", trials, lost, told)


def too_large_for_one(trials: int, work: Path) -> Outcome:
    """Not even one example fits."""
    lost = 0
    for trial in range(trials):
        room = PER_EXAMPLE * (trial + 1) // (trials + 1)
        process = complete(work / str(trial), *SEEDED, *MANY, f"train.microbatch={2**trial}", before=_limit(room))
        lost += not process.refused()
    return Outcome("out of memory with one example", trials, lost, "one sentence, exit 2")


def _limit(largest: int) -> Callable[[], Any]:
    """In a process: refuse all tensors with the shape of activations that are larger, in torch's words on a CPU."""
    return lambda: Refusing(largest).__enter__()


class Refusing(TorchDispatchMode):
    """An allocator that has no room for a tensor (n, c, h, w) of more than `largest` bytes."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and self._refused(tensor):
                raise RuntimeError(
                    f"[enforce fail] . DefaultCPUAllocator: can't allocate memory: {tensor.nbytes} bytes."
                )
        return made

    def _refused(self, tensor: torch.Tensor) -> bool:
        activations = (
            tensor.dim() == 4 and tensor.shape[1] >= 16 and tensor.shape[2:] == (8, 8)
        )  # no images, no weights
        return activations and tensor.nbytes > self.largest
