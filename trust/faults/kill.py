"""Kills or terminates runs many times at random moments, and resumes them each time."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trust.faults.process import STEPS, Outcome, complete, logged, result_of, run_folder, same, start, wait_for

MODES = (
    ("clip=adaptive_layer",),
    ("clip=flat",),
    ("clip=ghost", "optim=adam", "optim.learning_rate=0.001"),
    ("clip=fixed_layer", "optim.momentum=0.9"),
    ("clip=adaptive_block", "optim.schedule=cosine"),
    ("clip=adaptive_flat", "eval.every=1", "train.keep=[1]"),
)
ENDS = ("model.pt", "system.json", "result.json")
"""Files that are written after the last step, in this order."""

Moment = Callable[[Path], Callable[[], bool]]
"""The results folder of a run -> a function that returns whether the moment has come."""


def stopped(number: int, trials: int, work: Path, seed: int = 0) -> Outcome:
    """End runs with a signal at least `trials` times, about ten times each, and resume them each time.

    Every run has its own secret key, so its folder is copied after the first stop. The copy is resumed without further
    stops, and the run must end with the same result.
    """
    chance, name = random.Random(seed), signal.Signals(number).name
    tried = lost = chain = 0
    while tried < trials:
        times, good = _chain(number, work / f"{name}-{chain}", MODES[chain % len(MODES)], chance, fresh=chain == 0)
        tried, lost, chain = tried + times, lost + (not good), chain + 1
    how = "leaves after a checkpoint with exit code 130; " if number == signal.SIGTERM else ""
    return Outcome(f"{name} at random moments", tried, lost, f"{how}goes on and ends with the same bits")


def _chain(number: int, where: Path, mode: tuple[str, ...], chance: random.Random, fresh: bool) -> tuple[int, bool]:
    """The number of times that one run was stopped, and whether it ended like its undisturbed copy."""
    started = _after_step(0, 0.0)
    times, good, undisturbed = 0, True, where.with_name(f"{where.name}-undisturbed")
    for moment in (started, *_moments(chance)):
        process = start(where, *mode, fresh=fresh)
        if wait_for(process, moment(where)):
            times += process.send(number)
        good &= process.wait() in (-number, 130, 0) and "Traceback" not in process.errors
        if not undisturbed.exists():
            shutil.copytree(where, undisturbed)
    for results in (where, undisturbed):
        last = complete(results, *mode)
        good &= last.code == 0
    return times, good and same(where, result_of(undisturbed))


def _moments(chance: random.Random) -> Iterator[Moment]:
    """Nine moments: two while the program starts, five during steps, in order, and two after the last step."""
    steps = sorted(chance.choices(range(1, STEPS), k=5))
    ends = sorted(chance.sample(range(len(ENDS)), k=2))
    yield _after_seconds(chance.uniform(0.0, 1.0))
    for step in steps[:3]:
        yield _after_step(step, chance.uniform(0.0, 0.05))
    yield _after_seconds(chance.uniform(0.0, 3.0))
    for step in steps[3:]:
        yield _after_step(step, chance.uniform(0.0, 0.05))
    for end in ends:
        yield _as_written(ENDS[end], chance.uniform(0.0, 0.005))


def _after_seconds(seconds: float) -> Moment:
    def moment(_: Path) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    return moment


def _after_step(step: int, seconds: float) -> Moment:
    """`seconds` after the run has logged this step (0: after its first checkpoint)."""

    def moment(results: Path) -> Callable[[], bool]:
        def happened() -> bool:
            if not (run_folder(results) / "checkpoint.pt").exists() or logged(results) < step:
                return False
            time.sleep(seconds)
            return True

        return happened

    return moment


def _as_written(name: str, seconds: float) -> Moment:
    """Just after a file is written."""

    def moment(results: Path) -> Callable[[], bool]:
        before = _changed(results, name)

        def happened() -> bool:
            if _changed(results, name) == before:
                return False
            time.sleep(seconds)
            return True

        return happened

    return moment


def _changed(results: Path, name: str) -> int | None:
    try:
        return (run_folder(results) / name).stat().st_mtime_ns
    except FileNotFoundError:
        return None
