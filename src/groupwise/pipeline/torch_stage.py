"""Runs torch's own pipeline stage and schedule, whose passes go through the engine microbatch by microbatch.

A step's microbatches have one shape, so torch is told every shape beforehand, and no pass runs that is not part of the
step. The stage is made anew for each step, because a Poisson sample decides on shapes and number of microbatches; its
buffers go with it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from groupwise.errors import UserError, did_you_mean
from groupwise.pipeline.split import Stage
from groupwise.training.task import Microbatch

Around = Callable[[int], AbstractContextManager[object]]
"""What runs around the pass of one microbatch, by its number."""


class SteppedStage(PipelineStage):
    """A stage for one step.

    Args:
        stage: the piece of the model.
        microbatches: of the step; each stage takes of them what it needs.
        held: how many microbatches are held at once between their passes. Torch makes a receive buffer for every
            microbatch of a step; here they are used again once a microbatch is done.
        around: what runs around the forward and the backward pass of a microbatch.
        device, group: of this process, and the processes of the pipeline.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: Sequence[Microbatch],
        held: int,
        around: tuple[Around, Around],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._microbatches, self._held = microbatches, held
        self._around_forward, self._around_backward = around
        super().__init__(
            stage,
            stage.index,
            stage.count,
            device,
            input_args=_received(stage, microbatches[0].first),
            output_args=_sent(stage, microbatches[0].first),
            group=group,
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward pass of one microbatch, with its own inputs."""
        microbatch = self._microbatches[fwd_chunk_id]
        with self._around_forward(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, (microbatch.first,), microbatch.kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one microbatch."""
        with self._around_backward(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(min(self._held, num_microbatches), has_backward)
        _repeat(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(min(self._held, num_microbatches))
        _repeat(self.grad_recv_info, num_microbatches)
        self.chunks = num_microbatches


def _repeat(buffers: dict[int, Any], count: int) -> None:
    """Microbatch i takes the buffers of microbatch i - held, which is done by then."""
    held = len(buffers)
    for i in range(held, count):
        buffers[i] = buffers[i - held]


def _received(stage: Stage, first: Tensor) -> Tensor:
    """What comes into the stage, as torch wants to see it: shape, type, and whether a gradient goes back."""
    if stage.first:
        return torch.empty_like(first, device="meta")
    shape = stage.activation(len(first), first.shape[-1], before=True)
    return torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)


def _sent(stage: Stage, first: Tensor) -> Tensor:
    """What goes out of it; the last stage's losses stay where they are, and are not looked at."""
    shape = (len(first),) if stage.last else stage.activation(len(first), first.shape[-1])
    return torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)


_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

_TWO_BACKWARDS = (
    "splits the backward pass into one for inputs and one for weights, so every example would be clipped and counted "
    "twice"
)
_TWO_STAGES = "puts several stages on one device, which has one clipping group and one noise stream"
_REFUSED = {
    "zb1p": _TWO_BACKWARDS,
    "zbvzerobubble": _TWO_BACKWARDS,
    "interleavedzerobubble": _TWO_BACKWARDS,
    "dualpipev": _TWO_BACKWARDS,
    "interleaved1f1b": _TWO_STAGES,
    "loopedbfs": _TWO_STAGES,
}


def check_schedule(name: str) -> None:
    """Refuse a schedule that is not known, or under which clipping would go wrong.

    Raises:
        UserError: with the reason.
    """
    if name in _SCHEDULES:
        return
    reason = _REFUSED.get(name.lower().replace("_", "").replace("-", ""))
    if reason is None:
        reason = f"is not known{did_you_mean(name, tuple(_SCHEDULES))}"
    raise UserError(f"pipeline.schedule={name} {reason}: choose 1f1b or gpipe.")


def least_microbatches(name: str, stages: int) -> int:
    """How many microbatches a step must have at least: 1F1B wants one for every stage."""
    return stages if name == "1f1b" else 1


def held_at_once(name: str, stages: int, index: int, microbatches: int) -> int:
    """How many microbatches stage `index` holds at once between their passes: S - s for 1F1B, all for GPipe."""
    return min(microbatches, stages - index) if name == "1f1b" else microbatches


def make_schedule(name: str, stage: PipelineStage, microbatches: int) -> PipelineScheduleSingle:
    """The schedule of one step on this stage; the last stage's output is one loss an example, and they are summed."""
    return _SCHEDULES[name](stage, microbatches, loss_fn=lambda losses, _: losses.sum(), scale_grads=False)
