"""Sends what goes between stages outside a training step: activations to the next, the last one's word to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.pipeline.split import Stage
from groupwise.training.task import eval_mode


class StageLink:
    """One process's link to the other stages; all processes of the pipeline make the same calls in the same order.

    With one stage nothing is sent, and no process group is asked.

    Args:
        stage: the piece of the model that this process hosts.
        device: of this process.
        group: the processes of the pipeline, in the order of the stages; None takes all.
    """

    def __init__(self, stage: Stage, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.stage, self.device, self._group = stage, device, group

    def through(self, first: Tensor, **kwargs: Any) -> Tensor | None:
        """One forward pass: take from the stage before, run `stage.hidden`, give to the stage after.

        Args:
            first: what the first stage reads, on this device; the others need its shape alone.
            kwargs: what `stage.hidden` takes.

        Returns:
            On the last stage its hidden activations; None on the others.
        """
        stage = self.stage
        if not stage.first:
            shape = stage.activation(len(first), first.shape[-1], before=True)
            first = torch.empty(shape, dtype=stage.dtype, device=self.device)
            dist.recv(first, group=self._group, group_src=stage.index - 1)
        hidden = stage.hidden(first, **kwargs)
        if stage.last:
            return hidden
        dist.send(hidden, group=self._group, group_dst=stage.index + 1)
        return None

    def broadcast_(self, numbers: Tensor) -> Tensor:
        """The last stage's tensor to all, in place; the others pass one of its shape and type."""
        if self.stage.count > 1:
            dist.broadcast(numbers, group=self._group, group_src=self.stage.count - 1)
        return numbers

    def broadcast(self, value: Any) -> Any:
        """What the last stage passed in, to all; for small things, seldom."""
        values = [value]
        if self.stage.count > 1:
            dist.broadcast_object_list(values, group=self._group, group_src=self.stage.count - 1, device=self.device)
        return values[0]


@contextmanager
def evaluating(stage: Stage) -> Iterator[None]:
    """Eval mode without gradients; then the mode it was in."""
    with eval_mode(stage), torch.no_grad():
        yield
