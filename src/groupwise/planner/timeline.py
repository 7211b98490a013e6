"""Simulates when each stage does what, under per-device clipping and the ways to clip flat in a pipeline (section 4).

Tasks come in the order of a schedule, each after those that it waits for; from them a step's time, memory and traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.pipeline.runner import held_at_once

Key = tuple[str, int, int]
"""A task: its kind ("F", "B", …), microbatch and stage."""
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
        gradients: bytes of one microbatch's per-example gradients, by stage.
        edges: bytes of one microbatch that enter and leave a stage, by stage.
        host: bytes a second to and from the host.
        bandwidth: bytes a second between a device and its memory.
        rematerialize: whether `backward` begins with a forward pass.
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
    gradients: tuple[int, ...]
    edges: tuple[int, ...]
    host: float
    bandwidth: float
    rematerialize: bool
    cores: float = float("inf")

    @property
    def again(self) -> tuple[float, ...]:
        """Seconds to make a microbatch's local gradients once more, by stage."""
        forward = [0.0 if self.rematerialize else seconds for seconds in self.forward]
        return tuple(a + b for a, b in zip(forward, self.backward, strict=True))


@dataclass(frozen=True)
class Variant:
    """One way to clip.

    Args:
        name, sync: which, and when the stages tell each other their norms.
        seconds: of a step.
        device: bytes beside those of per-device clipping, on the stage that has most.
        host: bytes in the host's memory, on the stage that has most.
        traffic: bytes between devices and host in a step, over all stages.
    """

    name: str
    sync: str
    seconds: float
    device: int = 0
    host: int = 0
    traffic: int = 0


def per_device(setting: Setting) -> Variant:
    """Algorithm 2: every stage clips alone."""
    return Variant("per-device", "never", _seconds(setting, _base(setting)))


def two_passes(setting: Setting) -> Variant:
    """Flat clipping as this project's pipeline does it: norms of the whole batch first, then all of it again."""
    norms = tasks(setting.schedule, setting.microbatches, setting.forward, setting.norms, setting.message)
    seconds = duration(norms, setting.cores) + setting.agree
    return Variant("flat, two passes", "between them", seconds + _seconds(setting, _base(setting)))


def flat_variants(setting: Setting) -> list[Variant]:
    """Hold, offload and rematerialise, with a synchronisation after every microbatch and with one at the end."""
    each, end = "each microbatch", "once, at the end"
    count, most = setting.microbatches, max(setting.gradients)
    total = count * sum(setting.gradients)
    moving = [2 * size / setting.host for size in setting.gradients]
    adding = [2 * size / setting.bandwidth for size in setting.gradients]
    again, nothing = setting.again, [0.0] * len(setting.forward)
    waiting = min(count, len(setting.forward))  # microbatches whose norms are not known yet, on the last stage
    return [
        Variant("flat, hold", each, _each(setting, nothing, adding, pause=True)),
        Variant("flat, offload", each, _each(setting, moving, adding), host=waiting * most, traffic=2 * total),
        Variant("flat, rematerialise", each, _each(setting, nothing, again), device=waiting * max(setting.edges)),
        Variant("flat, hold", end, _end(setting, nothing, adding), device=(count - 1) * most),
        Variant("flat, offload", end, _end(setting, moving, adding), host=count * most, traffic=2 * total),
        Variant("flat, rematerialise", end, _end(setting, nothing, again), device=count * max(setting.edges)),
    ]


def _base(setting: Setting, more: Sequence[float] | None = None) -> list[list[Task]]:
    backward = [a + b for a, b in zip(setting.backward, more or [0.0] * len(setting.backward), strict=True)]
    return tasks(setting.schedule, setting.microbatches, setting.forward, backward, setting.message)


def _seconds(setting: Setting, work: list[list[Task]]) -> float:
    return duration(work, setting.cores) + setting.agree + setting.update


def _each(setting: Setting, beside: Sequence[float], then: Sequence[float], *, pause: bool = False) -> float:
    """A step with a synchronisation for each microbatch.

    Args:
        setting: the step.
        beside: seconds more of every backward pass, by stage.
        then: seconds of what a stage does for a microbatch once its norms are known, by stage.
        pause: whether a stage waits for that before it does anything else; otherwise it continues with other tasks
            until the first stage reaches the same microbatch.
    """
    last = setting.microbatches - 1

    def placed(stage: int, work: list[Task]) -> list[Task]:
        done: list[Task] = []
        for task in work:
            done.append(task)
            kind, j, _ = task.key
            if kind == "B":
                ahead = 0 if pause else stage
                due = range(last - ahead, last + 1) if j == last else [j - ahead]
                done += [_then(setting, i, stage, then[stage]) for i in due if i >= 0]
        return done

    work = [placed(stage, list(work)) for stage, work in enumerate(_base(setting, beside))]
    return _seconds(setting, work)


def _then(setting: Setting, j: int, stage: int, seconds: float) -> Task:
    """After the first stage, which the backward pass reaches last, has sent its norms."""
    return Task(("then", j, stage), seconds, ((("B", j, 0), setting.agree),))


def _end(setting: Setting, beside: Sequence[float], then: Sequence[float]) -> float:
    count = setting.microbatches
    work: list[list[Task]] = []
    for stage, before in enumerate(_base(setting, beside)):
        after = (("B", count - 1, 0), setting.agree)
        work.append([*before, Task(("then", 0, stage), count * then[stage], (after,))])
    return _seconds(setting, work)
