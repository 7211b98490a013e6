"""Computes the time of a step: each stage's passes in the order of the schedule, and the messages between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from groupwise.pipeline.runner import held_at_once


def order(schedule: str, stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    """The sequence of a stage's passes: ("F", j) and ("B", j)."""
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


def duration(
    schedule: str, microbatches: int, forward: Sequence[float], backward: Sequence[float], message: float
) -> float:
    """Seconds until the last pass of the last microbatch is done.

    Args:
        schedule: "1f1b" or "gpipe".
        microbatches: J.
        forward: seconds of one microbatch's forward pass, by stage.
        backward: the same of its backward pass, recomputation included.
        message: seconds from one stage to the next.
    """
    stages = len(forward)
    left = [order(schedule, stages, stage, microbatches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    now = [0.0] * stages
    while any(left):
        for stage, passes in enumerate(left):
            while passes:
                kind, j = passes[0]
                before = (kind, j, stage - 1 if kind == "F" else stage + 1)
                if 0 <= before[2] < stages:
                    if before not in done:
                        break
                    now[stage] = max(now[stage], done[before] + message)
                now[stage] += (forward if kind == "F" else backward)[stage]
                done[kind, j, stage] = now[stage]
                del passes[0]
    return max(now)


class Times(NamedTuple):
    """Of one step of a pipeline, in seconds."""

    microbatches: int
    """J."""
    forward: tuple[float, ...]
    """Of a microbatch, by stage."""
    backward: tuple[float, ...]
    """The same, recomputation included."""
    per_device: float
    """Of a step in which every stage clips alone (Algorithm 2)."""
    flat: float
    """Of a step with flat clipping: norms of the whole batch first, then all of it again."""
