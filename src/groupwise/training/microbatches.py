"""Forms the clipped sums of a drawn batch, as many examples at a time as there is memory for."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.training.memory import halve_on_oom, is_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.task import Task


class Microbatches(ABC):
    """A `BatchSums` that runs one microbatch after the other.

    Args:
        size: examples at once, at most. It changes the update by rounding and dropout masks only.
    """

    keeps_gradients = False

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def share(self, drawn: np.ndarray, ranks: Alone | Ranks) -> np.ndarray:
        """This process's examples of a batch, (n,), in the order in which they share microbatches."""

    @abstractmethod
    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, filler: bool) -> Tensor:
        """Add the clipped sums of the microbatch that begins at `start` in the share; returns its losses, (b,)."""

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Release what is kept for microbatches of this size."""

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        """See `groupwise.training.private_step.BatchSums`.

        If memory runs out, the batch begins again with microbatches of half the size. If the norm of an example is not
        finite and its rows were not masked, it begins again with masks. Nothing has been released by then, and the
        noise of the step stays the same.
        """
        share, engine = self.share(drawn, private.ranks), private.engine

        def sums(size: int) -> Tensor:
            private.clear()
            if size != self.size:  # memory ran out
                self.forget()
                self.size = size
                if private.device.type == "cuda":
                    torch.cuda.empty_cache()
            return self._run_all(private, step, share, drawn)

        if engine is not None:
            engine.masks_rows = private.in_shards  # where other processes wait, no batch can begin again
        try:
            loss = halve_on_oom(self.size, sums, "continuing", alone=not private.in_shards)
            if engine is not None and engine.has_nonfinite:
                engine.masks_rows = True
                loss = halve_on_oom(self.size, sums, "continuing", alone=not private.in_shards)
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            if self.size == 1:
                raise UserError("One example does not fit into memory: use a smaller model.") from error
            raise UserError(f"{self.size} examples do not fit into memory: use a smaller microbatch.") from error
        return loss

    def split(
        self, private: PrivateStep, share: np.ndarray, drawn: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, bool]]:
        """The microbatches of a share: where each begins, its examples, and whether it is a filler.

        In shards all processes run equally many, as each needs the parameters of the others; a process that has no more
        examples takes the first of the batch as a filler.
        """
        most = -(-len(drawn) // private.ranks.replicas) if private.in_shards else len(share)
        for start in range(0, most, self.size):
            rows = share[start : start + self.size]
            yield start, rows if len(rows) else drawn[:1], not len(rows)

    def _run_all(self, private: PrivateStep, step: int, share: np.ndarray, drawn: np.ndarray) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=private.device)
        for start, rows, filler in self.split(private, share, drawn):
            with private.microbatch(step, start):
                losses = self.run(private, step, start, rows, filler)
            if not filler:
                total += losses.sum()
        return total


class TaskSums(Microbatches):
    """Clipped sums of batches of a task.

    Args:
        task: whose examples are read and whose losses are computed.
        size: examples at once, at most.
    """

    def __init__(self, task: Task, size: int) -> None:
        super().__init__(size)
        self.task = task

    def share(self, drawn: np.ndarray, ranks: Alone | Ranks) -> np.ndarray:
        """This process's part of the batch in the task's order, so that all replicas have equally long examples."""
        return ranks.share(self.task.order(drawn))

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, filler: bool) -> Tensor:
        """See `Microbatches`."""
        return private.clip(self.task.losses_of, rows, filler)  # type: ignore[arg-type]  # rows are numbers


CHECKED = 5
"""Examples that are compared with a loop over single ones before training."""


def examples_to_trace(ordered: Sequence[int] | np.ndarray, most: int = 6) -> list[int]:
    """Of examples in the order of their sizes the first, the last, and some evenly spaced between them."""
    places = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int).tolist()
    return [int(ordered[place]) for place in dict.fromkeys([*places[:1], *places[-1:], *places[1:-1]])]
