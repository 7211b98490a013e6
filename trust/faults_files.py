"""Files that something else has been at: checkpoints, and the data."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import numpy as np

from trust.faults_process import SEEDED, STEPS, Outcome, complete, halting, left, run_folder, same, start, wait_for

HARM = ("cut", "flip", "zeros", "empty", "gone", "more")


def harm(path: Path, how: str, chance: random.Random) -> None:
    """Cut a file, flip one bit of it, zero a block, empty it, remove it, or add to it."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if how == "gone":
        path.unlink()
        return
    if how == "cut":
        del content[place:]
    elif how == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif how == "zeros":
        content[place : place + 512] = bytes(b ^ 0xFF for b in content[place : place + 512])
    elif how == "empty":
        content.clear()
    else:
        content += b"\0"
    path.write_bytes(content)


def checkpoint_altered(trials: int, work: Path, seed: int = 5) -> Outcome:
    """The last checkpoint is harmed while nobody is at the run; the one before it takes its place."""
    chance, lost = random.Random(seed), 0
    interrupted, expected = _interrupted(work, chance)
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        folder = run_folder(results)
        assert folder is not None
        harm(folder / "checkpoint.pt", HARM[trial % len(HARM)], chance)
        process = complete(results, *SEEDED)
        told = process.errors.count("warning: ") == 1 and "going on from the one before it" in process.errors
        lost += not (process.code == 0 and told and same(results, expected))
    return Outcome(
        "checkpoint truncated or altered", trials, lost, "one warning; goes on from the one before it to the same bits"
    )


def both_altered(trials: int, work: Path, seed: int = 6) -> Outcome:
    """Both checkpoints are harmed: nothing to go on from, and nothing is written."""
    chance, lost = random.Random(seed), 0
    interrupted, _ = _interrupted(work, chance)
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        folder = run_folder(results)
        assert folder is not None
        for name in ("checkpoint.pt", "checkpoint-previous.pt"):
            harm(folder / name, chance.choice([how for how in HARM if how != "gone"]), chance)
        before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
        process = complete(results, *SEEDED)
        after = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
        lost += not (process.refused() and before == after)
    return Outcome("both checkpoints altered", trials, lost, "refused in one sentence, exit 2, folder untouched")


def data_altered(trials: int, work: Path, seed: int = 7) -> Outcome:
    """The data file is harmed between two parts of a run: it is refused, and goes on when the data are back."""
    chance, lost, generator = random.Random(seed), 0, np.random.default_rng(seed)
    work.mkdir(parents=True, exist_ok=True)
    data = work / "data.npz"
    arrays = {
        f"{kind}_{part}": generator.integers(0, top, (count, *shape), dtype=np.uint8)
        for part, count in (("train", 96), ("test", 40))
        for kind, top, shape in (("x", 256, (8, 8, 3)), ("y", 10, ()))
    }
    np.savez(data, **arrays)  # type: ignore[arg-type]
    settings = ("data.name=cifar10", f"paths.data={data}")
    interrupted, expected = _interrupted(work, chance, *settings)
    whole = data.read_bytes()
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        harm(data, HARM[trial % len(HARM)], chance)
        process = complete(results, *SEEDED, *settings)
        good = process.refused()
        data.write_bytes(whole)
        lost += not (complete(results, *SEEDED, *settings).code == 0 and good and same(results, expected))
    return Outcome(
        "data file altered during a run",
        trials,
        lost,
        "refused in one sentence, exit 2; with the data back, the same bits",
    )


def _interrupted(work: Path, chance: random.Random, *settings: str) -> tuple[Path, dict[str, object]]:
    """A run that was killed on its way, and what it comes to."""
    results, whole = work / "interrupted", work / "whole"
    process = start(results, *SEEDED, *settings, before=halting(chance.randrange(3, STEPS - 4)))
    assert wait_for(process, process.standing), process.errors
    process.send(signal.SIGKILL)
    process.wait()
    complete(whole, *SEEDED, *settings)
    return results, left(whole)
