"""Simulates when each stage does what: tasks in the order of a schedule, each after those that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[str, int, int]
"""What is done ("F", "B", …), for which microbatch, on which stage."""
EPSILON = 1e-12  # of the clock, relative


@dataclass(frozen=True)
class Task:
    """Something that one stage does at one time.

    Args:
        key: its name among all tasks.
        seconds: of work.
        after: tasks of other stages that it waits for, each with the seconds that its result travels.
    """

    key: Key
    seconds: float
    after: tuple[tuple[Key, float], ...] = ()


def in_flight(schedule: str, stages: int, stage: int, microbatches: int) -> int:
    """The most microbatches whose forward pass is done at a stage and whose backward pass is not.

    1F1B: min(J, S - s), as stage s runs ahead of the last one by as many; GPipe: all J.
    """
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def order(schedule: str, stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage does, one after the other: ("F", j) and ("B", j)."""
    ahead = in_flight(schedule, stages, stage, microbatches)
    steps = [("F", j) for j in range(ahead)]
    for j in range(microbatches):
        steps.append(("B", j))
        if ahead + j < microbatches:
            steps.append(("F", ahead + j))
    return steps


def bubble_fraction(stages: int, microbatches: int) -> float:
    """(S - 1)/(J + S - 1): the share of the time that each of S equal stages waits (Huang et al., section 2.3)."""
    return (stages - 1) / (microbatches + stages - 1)


def tasks(
    schedule: str, microbatches: int, forward: Sequence[float], backward: Sequence[float], message: float
) -> list[list[Task]]:
    """A schedule as tasks, in order, for each stage.

    Args:
        schedule: "1f1b" or "gpipe".
        microbatches: J.
        forward: seconds of one microbatch's forward pass, by stage.
        backward: the same of its backward pass, recomputation included.
        message: seconds from one stage to the next.
    """
    stages = len(forward)

    def task(stage: int, kind: str, j: int) -> Task:
        beside = stage - 1 if kind == "F" else stage + 1
        after = (((kind, j, beside), message),) if 0 <= beside < stages else ()
        return Task((kind, j, stage), (forward if kind == "F" else backward)[stage], after)

    return [
        [task(stage, kind, j) for kind, j in order(schedule, stages, stage, microbatches)] for stage in range(stages)
    ]


def duration(work: Sequence[Sequence[Task]], cores: float = float("inf")) -> float:
    """Seconds until all is done.

    Args:
        work: the tasks of each stage, in its order.
        cores: processors that the stages share; those that work at the same time are equally slow.

    Raises:
        ValueError: tasks that wait for each other.
    """
    return _Run(work, cores).duration()


class _Run:
    def __init__(self, work: Sequence[Sequence[Task]], cores: float) -> None:
        self._work, self._cores = work, cores
        self._next = [0] * len(work)
        self._left: dict[int, float] = {}
        self._done: dict[Key, float] = {}
        self._now = 0.0

    def duration(self) -> float:
        while any(place < len(tasks) for place, tasks in zip(self._next, self._work, strict=True)):
            starts = [self._start(stage) for stage in range(len(self._work))]
            slow = max(1.0, len(self._left) / self._cores)
            ends = {stage: self._now + left * slow for stage, left in self._left.items()}
            moments = [*ends.values(), *(start for start in starts if start is not None)]
            if not moments:
                raise ValueError("these tasks wait for each other")
            moment = min(moments)
            for stage in ends:
                self._left[stage] -= (moment - self._now) / slow
            self._now = moment
            for stage, end in ends.items():
                if end <= moment * (1 + EPSILON):
                    self._finish(stage)
        return self._now

    def _start(self, stage: int) -> float | None:
        """Begin the stage's next task if it can; otherwise the later moment at which it could, if that is known."""
        if stage in self._left or self._next[stage] == len(self._work[stage]):
            return None
        task = self._work[stage][self._next[stage]]
        if not all(key in self._done for key, _ in task.after):
            return None
        ready = max((self._done[key] + delay for key, delay in task.after), default=0.0)
        if ready > self._now:
            return ready
        self._left[stage] = task.seconds
        return None

    def _finish(self, stage: int) -> None:
        del self._left[stage]
        self._done[self._work[stage][self._next[stage]].key] = self._now
        self._next[stage] += 1
