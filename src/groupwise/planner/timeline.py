"""Simulates the tasks of each stage in the order of a schedule, for the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.pipeline.runner import held_at_once

Key = tuple[str, int, int]
"""A task: its kind ("F" or "B"), microbatch and stage."""
EPSILON = 1e-12  # of the clock, relative


@dataclass(frozen=True)
class Task:
    """Work of one stage that is not interrupted.

    Args:
        key: its name among all tasks.
        seconds: of work.
        after: tasks of other stages that it waits for, each with the seconds that its result travels.
    """

    key: Key
    seconds: float
    after: tuple[tuple[Key, float], ...] = ()


def order(schedule: str, stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    """The sequence of a stage's tasks: ("F", j) and ("B", j)."""
    ahead = held_at_once(schedule, stages, stage, microbatches)
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


def duration(work: Sequence[Sequence[Task]], cores: float = math.inf) -> float:
    """Seconds until all is done.

    Args:
        work: the tasks of each stage, in its order.
        cores: processors that the stages share; those that work at the same time are equally slow.

    Raises:
        ValueError: tasks that wait for each other.
    """
    now, done = 0.0, dict[Key, float]()
    following = [0] * len(work)
    left: dict[int, float] = {}  # stages at work, and the seconds that their tasks still take
    while any(place < len(own) for place, own in zip(following, work, strict=True)):
        moments = []
        for stage, place in enumerate(following):
            if stage not in left and place < len(work[stage]):
                task = work[stage][place]
                ready = max((done.get(key, math.inf) + delay for key, delay in task.after), default=0.0)
                if ready <= now:
                    left[stage] = task.seconds
                elif ready < math.inf:
                    moments.append(ready)
        slow = max(1.0, len(left) / cores)
        ends = {stage: now + seconds * slow for stage, seconds in left.items()}
        if not (moments or ends):
            raise ValueError("these tasks wait for each other")
        moment = min([*moments, *ends.values()])
        for stage, end in ends.items():
            left[stage] -= (moment - now) / slow
            if end <= moment * (1 + EPSILON):
                del left[stage]
                done[work[stage][following[stage]].key] = moment
                following[stage] += 1
        now = moment
    return now


@dataclass(frozen=True)
class Setting:
    """One step of a pipeline.

    Args:
        schedule: 1f1b or gpipe.
        microbatches: J.
        forward, backward: seconds of a microbatch by stage, recomputation included in the latter.
        norms: the same of a backward pass that makes norms and no sums.
        update: seconds of noise and optimiser, of the slowest stage.
        message: seconds from one stage to the next.
        agree: seconds of an all-reduce of a few numbers.
        cores: processors that all stages share; infinite where each has its own.
    """

    schedule: str
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    norms: tuple[float, ...]
    update: float
    message: float
    agree: float
    cores: float = math.inf

    def _passes(self, backward: Sequence[float]) -> float:
        work = tasks(self.schedule, self.microbatches, self.forward, backward, self.message)
        return duration(work, self.cores) + self.agree

    @property
    def per_device(self) -> float:
        """Seconds of a step in which every stage clips alone (Algorithm 2)."""
        return self._passes(self.backward) + self.update

    @property
    def flat(self) -> float:
        """Seconds of a step with flat clipping: norms of the whole batch first, then all of it again."""
        return self._passes(self.norms) + self.per_device
