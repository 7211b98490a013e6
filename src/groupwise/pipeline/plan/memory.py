"""What each device holds at most during a step, and what that is made of."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.pipeline.plan.footprint import Footprint
from groupwise.pipeline.plan.timeline import in_flight

MOMENTS = 2  # of Adam


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; the parts that a step holds at its fullest moment add up to `peak`.

    Args:
        weights: frozen ones.
        state: of what trains: weights, gradients, and the optimiser's moments.
        activations: what microbatches in flight keep for their backward passes.
        working: what one forward or backward pass needs beside it.
        clipping: what clipping adds to that.
        buffers: where messages arrive, and those under way.
    """

    weights: int
    state: int
    activations: int
    working: int
    clipping: int
    buffers: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.state + self.activations + self.working + self.clipping + self.buffers


def stage_memory(
    plain: Footprint,
    clipped: Footprint,
    schedule: str,
    stages: int,
    stage: int,
    microbatches: int,
    *,
    all_at_once: bool,
) -> Memory:
    """The fullest moment of a stage's step.

    That is the first backward pass, or the forward pass before it, when the most microbatches are in flight. Under
    GPipe, whose messages are let go of at the end of the step alone, it may be the last backward pass.

    Args:
        plain: of the stage without clipping.
        clipped: with it.
        schedule: 1f1b or gpipe.
        stages, stage, microbatches: S, s and J.
        all_at_once: whether the optimiser takes all parameters in one go, as on a GPU, and not one after the other.
    """
    flying = in_flight(schedule, stages, stage, microbatches)
    received = flying * (clipped.received + clipped.sent)
    under_way = clipped.received if microbatches > 1 else 0  # the gradient that was sent last
    state = (2 + MOMENTS) * clipped.trained

    def held(footprint: Footprint) -> tuple[int, int, int]:
        """Activations, working memory and messages at the fullest moment."""
        forward = (flying - 1) * footprint.stored, footprint.forward, received + under_way
        backward = flying * footprint.stored, footprint.backward, received + under_way
        moments = [forward, backward]
        if schedule == "gpipe":
            messages = (flying - 1) * (footprint.sent + footprint.received)
            moments = [(*backward[:2], received), (footprint.stored, footprint.backward, received + messages)]
        update = (0, 2 * (footprint.trained if all_at_once else footprint.largest), 0)
        return max(*moments, update, key=sum)

    activations, working, buffers = held(clipped)
    return Memory(
        weights=clipped.frozen,
        state=state,
        activations=activations,
        working=working - (extra := max(0, working - held(plain)[1])),
        clipping=extra,
        buffers=buffers,
    )
