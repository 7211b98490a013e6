"""What one stage holds, what one microbatch adds to it, and how much there is to compute: its own code, imagined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.pipeline.plan.meter import Imagined, Meter
from groupwise.pipeline.plan.work import Kind, Passes, Work, cut_out, inputs


@dataclass(frozen=True)
class Footprint:
    """Bytes of one stage and of one microbatch there, and operations.

    Args:
        frozen: weights that do not train.
        trained: weights that do.
        largest: the largest tensor among these.
        received: what comes from the stage before, 0 on the first.
        sent: what goes to the next stage, 0 on the last.
        stored: kept from the forward pass to the backward pass, `sent` among it and `received` not.
        forward: the most that a forward pass adds, what it stores among it.
        backward: the most that a backward pass adds to what is held at its beginning.
        forward_operations: of a microbatch.
        backward_operations: the same, recomputation and clipping included.
    """

    frozen: int
    trained: int
    largest: int
    received: int
    sent: int
    stored: int
    forward: int
    backward: int
    forward_operations: int
    backward_operations: int


def footprint(work: Work, kind: Kind, name: str) -> Footprint:
    """Imagine a microbatch go through a stage of this kind, forward and then backward with the passes `name`."""
    stage = cut_out(work, kind)
    imagined = Imagined()
    imagined.take(stage)
    parameters = list(stage.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with imagined.running() as meter:
        passes = Passes(stage, work, name)
        x, kwargs = inputs(stage, work)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)  # as for every microbatch but the first
        meter.ignore(x, *kwargs.values(), *(p.grad for p in trained if p.grad is not None))
        measured = _measured(meter, passes, x, kwargs)
    return Footprint(
        frozen=sum(p.nbytes for p in parameters if not p.requires_grad),
        trained=sum(p.nbytes for p in trained),
        largest=max(p.nbytes for p in trained),
        received=0 if kind.first else x.nbytes,
        **measured,
    )


def _measured(meter: Meter, passes: Passes, x: Tensor, kwargs: dict[str, Tensor]) -> dict[str, int]:
    begin = meter.restart()
    out = passes.forward(x, kwargs)
    forward, forward_operations, stored = meter.peak - begin, meter.operations, meter.held - begin
    gradient = None if passes.stage.last else torch.empty_like(out)
    if gradient is not None:
        meter.ignore(gradient)
    middle = meter.restart()
    passes.backward(out, gradient)
    x.grad = None
    return {
        "sent": 0 if gradient is None else out.nbytes,
        "stored": stored,
        "forward": forward,
        "backward": meter.peak - middle,
        "forward_operations": forward_operations,
        "backward_operations": meter.operations,
    }
