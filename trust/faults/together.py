"""Two processes on one folder, and clocks that jump."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trust.faults.process import (
    SEEDED,
    STEPS,
    Outcome,
    complete,
    halting,
    logged,
    run_folder,
    same,
    start,
    undisturbed,
    wait_for,
)

YEAR = 365 * 86400.0


def two(trials: int, work: Path, seed: int = 10) -> Outcome:
    """A second process, the same configuration, at a random moment of the first; every third with overwrite=true."""
    expected, chance, lost = undisturbed(work), random.Random(seed), 0
    for trial in range(trials):
        results, step = work / str(trial), chance.randrange(0, STEPS // 2)
        first = start(results, *SEEDED, before=halting(step + 1))  # or it might be done before the second is ready
        assert wait_for(first, first.standing), first.errors
        more = ("overwrite=true",) if trial % 3 == 2 else ()
        second = complete(results, *SEEDED, *more, said=work / f"second-{trial}")
        os.kill(first.pid, signal.SIGCONT)
        good = first.wait() == 0 and second.refused() and "another process" in second.errors
        lost += not (good and same(results, expected))
    return Outcome(
        "two processes on one folder", trials, lost, "the second is refused in one sentence, exit 2; the first unharmed"
    )


def clock(trials: int, work: Path, seed: int = 11) -> Outcome:
    """Wall clocks that jump by up to a year at every look, in runs that are killed, and files from other times."""
    expected, chance, lost = undisturbed(work), random.Random(seed), 0
    for trial in range(trials):
        results = work / str(trial)
        process = start(results, *SEEDED, before=_jumping(trial))
        step = chance.randrange(0, STEPS - 3)
        wait_for(process, lambda results=results, step=step: logged(results) > step)  # type: ignore[misc]
        process.send(signal.SIGKILL)
        process.wait()
        for path in run_folder(results).iterdir():
            when = chance.choice((0.0, time.time() + chance.uniform(-YEAR, YEAR)))
            os.utime(path, (when, when))
        again = complete(results, *SEEDED, before=_jumping(trial + 1))
        lost += not (again.code == 0 and same(results, expected))
    return Outcome("clock and file times jump", trials, lost, "killed and resumed all the same, to the same bits")


def _jumping(seed: int) -> Callable[[], None]:
    """Make the wall clock of a process jump; `time.monotonic` is the system's promise that it never does."""

    def jump() -> None:
        from groupwise.training import record

        chance, wall, wall_ns = random.Random(seed), time.time, time.time_ns

        class Jumping(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Jumping:
                return cls(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=chance.uniform(-YEAR, YEAR))

        time.time = lambda: wall() + chance.uniform(-YEAR, YEAR)
        time.time_ns = lambda: wall_ns() + int(chance.uniform(-YEAR, YEAR) * 1e9)
        record.datetime = Jumping  # type: ignore[misc]

    return jump
