"""Runs short of disk space or memory must stop with a one-sentence error, lose nothing and resume later.

The faults are a full disk, a limit on file sizes, a read-only folder, and memory that runs out in a step.
"""

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trust.faults.process import (
    SEEDED,
    STEPS,
    Outcome,
    complete,
    result_of,
    run_folder,
    same,
    start,
    stop_after,
    undisturbed,
    wait_for,
)

NEEDED = 1_300_000
"""The most bytes that a run writes: two checkpoints, one that is being written, and small files."""
SMALLEST, LARGEST = 1500, 330_000
"""Sizes in bytes of the files of a run; its stdout is smaller."""


def full(trials: int, work: Path, seed: int = 2) -> Outcome:
    """The file system has room for only a part of the run, and for all of it later."""
    expected, chance, tried, lost = undisturbed(work), random.Random(seed), 0, 0
    with _small_disk(work / "disk", 4_000_000) as disk:
        if disk is None:
            return Outcome("disk full", 0, 0, "not tried: it takes root to mount a small file system")
        filler = disk / "filler"
        while tried < trials:
            results = disk / "results"
            results.mkdir()
            room = os.statvfs(disk)
            filler.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - chance.randrange(NEEDED))))
            process = start(results, *SEEDED, output=work / str(tried))
            if process.wait() != 0:  # otherwise there was enough room
                filler.unlink()
                tried += 1
                lost += not (process.refused() and _goes_on(results, work, expected))
            filler.unlink(missing_ok=True)
            shutil.rmtree(results)
    result = "one sentence, exit 2; with room it goes on to the same bits"
    return Outcome("disk full (a small file system)", tried, lost, result)


def too_large(trials: int, work: Path, seed: int = 3) -> Outcome:
    """Files may not grow beyond a limit, which is lifted later."""
    expected, chance, lost = undisturbed(work), random.Random(seed), 0
    for trial in range(trials):
        results, size = work / str(trial), int(SMALLEST * (LARGEST / SMALLEST) ** chance.random())

        def limit(size: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        process = start(results, *SEEDED, before=limit)
        process.wait()
        lost += not (process.refused() and _goes_on(results, work, expected))
    result = "one sentence, exit 2; without it the run goes on to the same bits"
    return Outcome("files may not grow (a limit)", trials, lost, result)


def unwritable(trials: int, work: Path, seed: int = 4) -> Outcome:
    """A folder becomes read-only, at the beginning or after a random step; later it is writable again."""
    expected, chance, lost = undisturbed(work), random.Random(seed), 0
    for trial in range(trials):
        step = 0 if trial % 3 == 0 else chance.randrange(1, STEPS - 4)
        lost += not _without_permission(work / str(trial), step, expected)
    return Outcome("read-only folder", trials, lost, "one sentence, exit 2; given back, it goes on to the same bits")


def _without_permission(results: Path, step: int, expected: dict[str, Any]) -> bool:
    """Make the folder read-only after `step` steps (0: before the start); returns whether the resumed run ends well."""
    results.mkdir()
    if step == 0:
        results.chmod(0o555)

    def before() -> None:
        _obey()
        stop_after(step)()

    process = start(results, *SEEDED, before=before)
    if wait_for(process, process.is_stopped):
        run_folder(results).chmod(0o555)
        process.send(signal.SIGCONT)
    process.wait()
    written = step == 0 and any(results.iterdir())
    for path in (results, *results.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    refused = process.refused()
    again = complete(results, *SEEDED, before=_obey)
    return refused and not written and again.code == 0 and same(results, expected)


def _goes_on(results: Path, work: Path, expected: dict[str, Any]) -> bool:
    return complete(results, *SEEDED, output=work / "again").code == 0 and same(results, expected)


def _obey() -> None:
    """Drop the capabilities by which root ignores permissions, in this process."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capabilities(7): version 3, this process
        sets = (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.capget(header, sets)
        sets[0] &= ~0b110  # effective: CAP_DAC_OVERRIDE is 1, CAP_DAC_READ_SEARCH is 2
        sets[1] &= ~0b110  # permitted
        if libc.capset(header, sets):
            raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """A file system of `size` bytes in memory; None if this process may not mount one."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


MANY = ("data.train_limit=256", "train.batch_size=128", "train.steps=3", "eval.batch_size=1", "eval.train_limit=4")
AT_ONCE = 128
PER_EXAMPLE = 8 * 8 * 16 * 4
"""Bytes of one example's activations after one of the first layers."""


def halved(trials: int, work: Path, seed: int = 8) -> Outcome:
    """Steps that do not fit in memory halve the microbatch, and end like a run with that microbatch."""
    chance, lost = random.Random(seed), 0
    for trial in range(trials):
        results, fits = work / str(trial), 2 ** chance.randrange(2, 7)
        process = complete(results, *SEEDED, *MANY, f"train.microbatch={AT_ONCE}", before=_limit(fits * PER_EXAMPLE))
        complete(expected := work / f"expected-{trial}", *SEEDED, *MANY, f"train.microbatch={fits}")
        good = process.code == 0 and "memory ran out" in process.errors
        good = good and json.loads((run_folder(results) / "system.json").read_text())["microbatch"] == fits
        lost += not (good and same(results, result_of(expected)))
    result = "a warning; examples at once halved, same batch and noise: the bits of a run set to that"
    return Outcome("out of memory in a step", trials, lost, result)


def too_large_for_one(trials: int, work: Path) -> Outcome:
    """Not even one example fits."""
    lost = 0
    for trial in range(trials):
        room = PER_EXAMPLE * (trial + 1) // (trials + 1)
        process = complete(work / str(trial), *SEEDED, *MANY, f"train.microbatch={2**trial}", before=_limit(room))
        lost += not (process.refused() and "Memory ran out" in process.errors)
    return Outcome("out of memory with one example", trials, lost, "one sentence, exit 2")


def _limit(largest: int) -> Callable[[], Any]:
    """A function for the new process: refuse larger tensors of activations, with torch's message on a CPU."""
    return lambda: Refusing(largest).__enter__()


class Refusing(TorchDispatchMode):
    """An allocator that has no room for a tensor (n, c, h, w) of more than `largest` bytes."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and self._refused(tensor):
                raise RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: {tensor.nbytes} bytes.")
        return result

    def _refused(self, tensor: torch.Tensor) -> bool:
        images_or_weights = tensor.dim() != 4 or tensor.shape[1] < 16 or tensor.shape[2:] != (8, 8)
        return not images_or_weights and tensor.nbytes > self.largest
