"""Speed is the CPU time of a private backward step beside a plain one, taken in turns in one process."""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trust.models.architecture import Architecture, Size, Subject
from trust.models.check import WAYS, Known, attempt, build, losses_of
from trust.models.rows import EXACT, Row

LARGE = Size(batch=8, tokens=64, width=128, image=32, vocabulary=1000)
SHORTEST = 0.02
"""Seconds of a plain step: the batch is doubled until it takes as long."""
MOST_EXAMPLES = 512
ROUNDS = 5
LONGEST = 3.0
"""Seconds that the private steps of one architecture in one mode may take; at least one is timed."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass, and the CPU seconds that it took each time."""

    run: Callable[[], None]
    seconds: list[float]

    def time(self) -> float:
        """Run it once more."""
        start = time.process_time()
        self.run()
        self.seconds.append(time.process_time() - start)
        return self.seconds[-1]


def with_speed(architecture: Architecture, known: Known, rows: Sequence[Row]) -> list[Row]:
    """The rows with the medians of both times, where the mode is exact; a failure at this size is noted."""
    size, plain = _plain_step(architecture, known)
    steps: dict[str, Step] = {}
    notes: dict[str, tuple[str, str]] = {}
    for row in rows:
        if row.status == EXACT:
            status, note, step = attempt(partial(_private_step, architecture, known, row.mode, size))
            if step is None:
                notes[row.mode] = status, f"At the larger size: {note}"
            else:
                steps[row.mode] = step
    for _ in range(ROUNDS):
        plain.time()
        for step in steps.values():
            if sum(step.seconds) < LONGEST:
                step.time()
    measured = []
    for row in rows:
        if row.mode in notes:
            row = replace(row, status=notes[row.mode][0], note=notes[row.mode][1])
        elif row.mode in steps:
            times = statistics.median(plain.seconds), statistics.median(steps[row.mode].seconds)
            row = replace(row, plain_ms=1e3 * times[0], private_ms=1e3 * times[1])
        measured.append(row)
    return measured


def _plain_step(architecture: Architecture, known: Known) -> tuple[Size, Step]:
    """The batch that makes a plain step long enough to be timed, and that step, warm."""
    size = LARGE
    while True:
        step = _step(build(architecture, size, torch.float32, known.frozen))
        step.run()
        if step.time() >= SHORTEST or size.batch >= MOST_EXAMPLES:
            step.seconds.clear()
            return size, step
        size = replace(size, batch=2 * size.batch)


def _private_step(architecture: Architecture, known: Known, mode: str, size: Size) -> Step:
    """The same step with an engine attached, warm unless it is very slow."""
    subject = build(architecture, size, torch.float32, known.frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = WAYS[mode].attach(subject.model, 1.0)
    examples = range(size.batch)
    engine.trace(partial(losses_of, subject), examples)
    step = _step(subject, partial(engine.clip, examples=examples))
    if step.time() < LONGEST / 2:
        step.seconds.clear()
    return step


def _step(subject: Subject, clip: Callable[[Callable[[Sequence[int]], Tensor]], Tensor] | None = None) -> Step:
    def losses(_: Sequence[int]) -> Tensor:
        return subject.losses(subject.model, subject.batch)

    def run() -> None:
        subject.model.zero_grad(set_to_none=True)
        if clip is None:
            losses(()).sum().backward()
        else:
            clip(losses)

    return Step(run, [])
