"""Computes the clipped sums of a batch in microbatches that fit into memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.training.graphs import Graphs
from groupwise.training.memory import halve_on_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import Task, to_device

ROUNDED = 16
"""With CUDA graphs, the rows of a microbatch are padded to a multiple of 1/16 of the usual number, for few graphs."""


class Microbatches(ABC):
    """A `BatchSums` that runs one microbatch after the other.

    Args:
        size: the largest number of examples in a microbatch. It affects only rounding and dropout masks.
        graphs: runs microbatches as CUDA graphs; None runs them eagerly.
    """

    def __init__(self, size: int, graphs: Graphs | None = None) -> None:
        self.size, self.graphs = size, graphs
        self.rounds = self.keeps_gradients = graphs is not None

    def order(self, drawn: np.ndarray) -> np.ndarray:
        """Sort the examples of a batch in the order in which they form microbatches."""
        return drawn

    @abstractmethod
    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, present: Tensor | None) -> Tensor:
        """Add the clipped sums of a microbatch to the gradients; returns its losses, (b,). See `PrivateStep.clip`.

        `start` is the index of the microbatch's first example in this process's share of the batch.
        """

    def forget(self) -> None:
        """Free everything that is kept for microbatches of this size."""
        if self.graphs is not None:
            self.graphs.forget()

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        """See `groupwise.training.private_step.BatchSums`.

        If memory runs out, the batch starts again with microbatches of half the size. If the norm of an example is not
        finite and rows were not masked, it starts again with masks. This is safe, as nothing was released before, and
        the step's noise does not change.
        """
        engine = private.engine

        def sums(size: int) -> Tensor:
            private.clear()
            if size != self.size:  # memory ran out
                self.forget()
                self.size = size
                torch.cuda.empty_cache()  # does nothing on a CPU
            return self._run_all(private, step, drawn)

        if engine is not None:
            engine.masks_rows = private.in_shards  # with shards a batch cannot start again, as other processes wait
        with nullcontext() if self.graphs is None else self.graphs.recorder.running():
            loss = halve_on_oom(self.size, sums, "continuing", alone=not private.in_shards)
            if engine is not None and engine.has_nonfinite:
                engine.masks_rows = True
                loss = halve_on_oom(self.size, sums, "continuing", alone=not private.in_shards)
        return loss

    def split(self, private: PrivateStep, drawn: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """Split this process's share of a batch into microbatches: yields start, rows and number of fillers of each.

        With shards all processes run the same number of microbatches, as each needs the others' parameters. A process
        that has no examples left uses the first example of the batch as a filler. If sizes are rounded, fillers are
        copies of the last row.
        """
        share, replicas = private.ranks.share(self.order(drawn)), private.ranks.replicas
        most = -(-len(drawn) // replicas) if private.in_shards else len(share)
        usual = min(self.size, private.plan.expected_batch_size / replicas)
        for start in range(0, most, self.size):
            rows = share[start : start + self.size]
            if not len(rows):
                yield start, drawn[:1], 1
                continue
            fillers = -len(rows) % max(1, round(usual / ROUNDED)) if self.rounds and len(rows) > 1 else 0
            fillers = min(fillers, self.size - len(rows))
            yield start, np.append(rows, rows[-1:].repeat(fillers)) if fillers else rows, fillers

    def _run_all(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=private.device)
        for start, rows, fillers in self.split(private, drawn):
            present = np.arange(len(rows)) < len(rows) - fillers if self.rounds or fillers else None
            with private.microbatch(step, start):
                on_device = None if present is None else to_device(present, private.device)
                total += self.run(private, step, start, rows, on_device).sum()
        return total


class TaskSums(Microbatches):
    """Clipped sums of batches of a task; see `Microbatches`."""

    def __init__(self, task: Task, size: int, graphs: Graphs | None = None) -> None:
        super().__init__(size, graphs)
        self.task = task

    def order(self, drawn: np.ndarray) -> np.ndarray:
        """The task's order, so that all replicas get examples of similar sizes."""
        return self.task.order(drawn)

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, present: Tensor | None) -> Tensor:
        """See `Microbatches`."""
        if self.graphs is None or present is None:
            return private.clip(self.task.losses_of, rows, present)  # type: ignore[arg-type]  # an array is a sequence
        task, read = self.task, partial(self.task.read, even=True)

        def losses_of(batch: Any, some: Any) -> Tensor:
            return task.losses(task.model, batch if some is rows else read(some))

        return self.graphs.clip(private, rows, present, read(rows), losses_of)


CHECKED = 5
"""The number of examples that are compared with a loop over single examples before training."""


def examples_to_trace(ordered: Sequence[int] | np.ndarray, most: int = 6) -> list[int]:
    """Choose up to `most` of the examples, which are sorted by size: first, last, and evenly spaced ones between."""
    at = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int).tolist()
    return [int(ordered[index]) for index in dict.fromkeys([*at[:1], *at[-1:], *at[1:-1]])]
