"""The processes of one run: their ranks, communication between them, and sums over replicas.

A run has D replicas of a pipeline of S stages, D·S processes; process r = d·S + s has stage s of replica d. One process
alone, where torch.distributed is not initialised, is D = S = 1.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from groupwise.errors import UserError

BUCKET = 1 << 26
"""Bytes per message: large enough for few messages, small enough for little extra memory."""


class Ranks:
    """The processes of torch's default group, of which this is one; without a group, this one alone.

    All of them call every method but `share` at the same time.

    Args:
        stages: S; the number of processes is a multiple of it.
        device: of this process; small sums go through it if the backend takes no tensors on the CPU (NCCL).
        timeout: how long a process waits for the others; None takes torch's.

    Raises:
        UserError: the processes do not divide into whole pipelines.
    """

    def __init__(
        self,
        stages: int = 1,
        device: torch.device | str = "cpu",
        timeout: timedelta | None = None,
    ) -> None:
        several = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if several else (1, 0)
        if world % stages:
            raise UserError(f"{world} processes cannot form pipelines of {stages} stages each: start a multiple of it.")
        self.replicas, self.stages = world // stages, stages
        self.replica, self.stage = divmod(rank, stages)
        self.main = rank == 0
        """Whether this process writes the record and shows the progress."""
        self._several = several
        places = np.arange(world).reshape(self.replicas, stages)
        self.data = _group_of(places.T, rank, timeout)
        """The process group of this stage in every replica."""
        self.pipeline = _group_of(places, rank, timeout)
        """That of every stage of this replica."""
        self._device = "cpu" if several and "cpu:" in dist.get_backend_config() else device

    def agree(self, *numbers: float) -> list[float]:
        """The sums over all processes, in float64 and the same everywhere, by one small all-reduce."""
        if not self._several:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums)
        return sums.tolist()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the replicas, in place; afterwards they are equal bit for bit.

        Each replica passes tensors of the same shapes in the same order.
        """
        self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=self.data))

    def copy_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first replica's values to all replicas, in place."""
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, group_src=0, group=self.data))

    @torch.no_grad()
    def _in_buckets(self, tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
        """Send few large messages: tensors of one kind in row-major order, whatever their memory layout."""
        for bucket in _take_tensors(tensors, BUCKET) if self.replicas > 1 else ():
            flat = _flatten_dense_tensors(bucket)
            send(flat)
            for tensor, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(part)

    def share(self, examples: np.ndarray) -> np.ndarray:
        """This replica's part of a drawn batch, (n,) -> (⌈n/D⌉ or ⌊n/D⌋,); all parts together are the batch.

        A share is every D-th example, so that a batch that is sorted by length gives all replicas the same work.
        """
        return examples[self.replica :: self.replicas]

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process; for small objects."""
        values = [value]
        if self._several:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in their order, to all; for small things."""
        if not self._several:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every process calls this."""
        self.gather(None)


def _group_of(lines: np.ndarray, rank: int, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """The processes in the same row of `lines` as this one."""
    if lines.shape[1] in (1, lines.size):
        return dist.group.WORLD
    groups = [dist.new_group(line.tolist(), timeout=timeout) for line in lines]  # all make all, in this order
    return next(group for line, group in zip(lines, groups, strict=True) if rank in line)
