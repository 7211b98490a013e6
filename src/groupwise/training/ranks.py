"""The processes of one run: their ranks, the communication between them, and sums over replicas.

A run has D replicas of a pipeline of S stages, in D·S processes. Process r = d·S + s runs stage s of replica d. If
torch.distributed is not initialised, there is one process, and D = S = 1.
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
"""Bytes per message: a compromise between the number of messages and extra memory."""


class Ranks:
    """The processes of torch's default process group; without a group, only this process.

    All processes must call each method together, except for `share`.

    Args:
        stages: S, the number of pipeline stages; the number of processes must be a multiple of it.
        device: the device of this process, for small sums if the backend cannot send CPU tensors (NCCL).
        timeout: how long a process waits for the others; None is torch's default.
    """

    def __init__(self, stages: int = 1, device: torch.device | str = "cpu", timeout: timedelta | None = None) -> None:
        several = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if several else (1, 0)
        if world % stages:
            raise UserError(f"{world} processes cannot form pipelines of {stages} stages: start a multiple of that.")
        self.replicas, self.stages = world // stages, stages
        self.replica, self.stage = divmod(rank, stages)
        self.main = rank == 0
        """Whether this process writes the record and shows the progress."""
        self._several = several
        grid = np.arange(world).reshape(self.replicas, stages)
        self.data = _group_of(grid.T, rank, timeout)
        """The process group of this stage in every replica."""
        self.pipeline = _group_of(grid, rank, timeout)
        """The process group of all stages of this replica."""
        self._device = "cpu" if several and "cpu:" in dist.get_backend_config() else device

    def agree(self, *numbers: float) -> list[float]:
        """Sum each number over all processes, in float64, by one small all-reduce. All processes get the same sums."""
        if not self._several:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums)
        return sums.tolist()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the replicas in place. Afterwards they are equal bit for bit in all replicas.

        Each replica passes tensors of the same shapes in the same order.
        """
        self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=self.data))

    def copy_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first replica's values to all replicas, in place."""
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, group_src=0, group=self.data))

    @torch.no_grad()
    def _in_buckets(self, tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
        """Send tensors of the same type together, in row-major order whatever their memory layout."""
        for bucket in _take_tensors(tensors, BUCKET) if self.replicas > 1 else ():
            flat = _flatten_dense_tensors(bucket)
            send(flat)
            for tensor, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(part)

    def share(self, examples: np.ndarray) -> np.ndarray:
        """This replica's share of a batch, (n,) -> (⌈n/D⌉ or ⌊n/D⌋,). The shares of all replicas form the batch.

        A share is every D-th example. So if a batch is sorted by length, all replicas get similar work.
        """
        return examples[self.replica :: self.replicas]

    def broadcast(self, value: Any) -> Any:
        """Send the main process's value, a small object, to all processes, and return it."""
        values = [value]
        if self._several:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, small objects, by rank."""
        if not self._several:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.gather(None)


def _group_of(grid: np.ndarray, rank: int, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """The process group of the row of `grid` that contains this rank."""
    if grid.shape[1] in (1, grid.size):
        return dist.group.WORLD
    groups = [dist.new_group(row.tolist(), timeout=timeout) for row in grid]  # every process must make all groups
    return next(group for row, group in zip(grid, groups, strict=True) if rank in row)
