"""Damages files of a run, or starts a second process in its folder, and checks that both are detected."""

import os
import random
import shutil
import signal
from pathlib import Path

from trust.faults.process import (
    SEEDED,
    STEPS,
    Outcome,
    complete,
    run_folder,
    same,
    start,
    stop_after,
    undisturbed,
    wait_for,
)

HARM = ("cut", "flip", "zeros", "empty", "gone", "more")
SMALL = ("flip", "more")
"""These may only change bytes that no checksum covers, which has no effect."""


def harm(path: Path, how: str, chance: random.Random) -> None:
    """Truncate a file, flip one bit of it, invert a block, empty it, remove it, or append to it."""
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
    """The last checkpoint is damaged while the run is stopped; the one before it takes its place."""
    chance, lost = random.Random(seed), 0
    interrupted, expected = _interrupted(work, chance)
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        harm(run_folder(results) / "checkpoint.pt", HARM[trial % len(HARM)], chance)
        process = complete(results, *SEEDED)
        warned = process.errors.count("warning: ") == 1 and "resuming from the one before it" in process.errors
        warned |= HARM[trial % len(HARM)] in SMALL
        lost += not (process.code == 0 and warned and same(results, expected))
    result = "one warning; goes on from the one before it to the same bits"
    return Outcome("checkpoint truncated or altered", trials, lost, result)


def both_altered(trials: int, work: Path, seed: int = 6) -> Outcome:
    """Both checkpoints are damaged: the run is refused, and nothing is written."""
    chance, lost = random.Random(seed), 0
    interrupted, _ = _interrupted(work, chance)
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        for name in ("checkpoint.pt", "checkpoint-previous.pt"):
            harm(run_folder(results) / name, chance.choice(("cut", "zeros", "empty")), chance)
        before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
        process = complete(results, *SEEDED)
        after = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
        lost += not (process.refused() and before == after)
    return Outcome("both checkpoints altered", trials, lost, "refused in one sentence, exit 2, folder untouched")


def data_altered(trials: int, work: Path, seed: int = 7) -> Outcome:
    """The data file is damaged between two parts of a run: the run is refused until the data are restored."""
    chance, lost = random.Random(seed), 0
    data = work / "SST-2" / "train.tsv"
    data.parent.mkdir(parents=True)
    rows = ["sentence\tlabel", *(f"a fine film {i}\t{i % 2}" for i in range(96))]
    for path in (data, data.with_name("dev.tsv")):
        path.write_text("\n".join(rows) + "\n")
    settings = ("task=sst2", "data.name=files", f"paths.data={work}", "train.sample_rate=null")
    interrupted, expected = _interrupted(work, chance, *settings)
    original = data.read_bytes()
    for trial in range(trials):
        results = shutil.copytree(interrupted, work / str(trial))
        harm(data, HARM[trial % len(HARM)], chance)
        process = complete(results, *SEEDED, *settings)
        good = process.refused()
        data.write_bytes(original)
        lost += not (complete(results, *SEEDED, *settings).code == 0 and good and same(results, expected))
    return Outcome(
        "data file altered during a run",
        trials,
        lost,
        "refused in one sentence, exit 2; with the data back, the same bits",
    )


def _interrupted(work: Path, chance: random.Random, *settings: str) -> tuple[Path, dict[str, object]]:
    """The folder of a run that was killed, and the result of the undisturbed run."""
    results = work / "interrupted"
    process = start(results, *SEEDED, *settings, before=stop_after(chance.randrange(3, STEPS - 4)))
    assert wait_for(process, process.is_stopped), process.errors
    process.send(signal.SIGKILL)
    process.wait()
    return results, undisturbed(work, *settings)


def two(trials: int, work: Path, seed: int = 10) -> Outcome:
    """Start a second process with the same configuration at a random step; each third one has overwrite=true."""
    expected, chance, lost = undisturbed(work), random.Random(seed), 0
    for trial in range(trials):
        results, step = work / str(trial), chance.randrange(0, STEPS // 2)
        first = start(results, *SEEDED, before=stop_after(step + 1))  # it must not end too early
        assert wait_for(first, first.is_stopped), first.errors
        more = ("overwrite=true",) if trial % 3 == 2 else ()
        second = complete(results, *SEEDED, *more, output=work / f"second-{trial}")
        os.kill(first.pid, signal.SIGCONT)
        good = first.wait() == 0 and second.refused() and "another process" in second.errors.lower()
        lost += not (good and same(results, expected))
    result = "the second is refused in one sentence, exit 2; the first unharmed"
    return Outcome("two processes on one folder", trials, lost, result)
