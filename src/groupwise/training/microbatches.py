"""Forms the clipped sums of a drawn batch, as many examples at a time as there is memory for."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.training.memory import is_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.ranks import Alone, Ranks


class Microbatches(ABC):
    """A `BatchSums` by microbatches, which follow each other.

    Args:
        size: examples at once, at most. The update depends on it by rounding and masks alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def share(self, drawn: np.ndarray, ranks: Alone | Ranks) -> np.ndarray:
        """This process's examples of a batch, (n,), in the order in which they share microbatches."""

    @abstractmethod
    def losses_of(self, rows: Sequence[int]) -> Tensor:
        """One loss for each of some examples, (n,)."""

    def begin(self, private: PrivateStep, step: int) -> None:  # noqa: B027 (most read when they are asked)
        """The microbatches of a step follow, from its first."""

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, filler: bool) -> Tensor:
        """Add the clipped sums of the microbatch that begins at `start` in the share; returns its losses, (b,)."""
        return private.clip(self.losses_of, rows, filler)  # type: ignore[arg-type]  # an array is a sequence of numbers

    def end(self, private: PrivateStep, step: int) -> None:  # noqa: B027
        """All microbatches of a step have run."""

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Let go of memory that is kept for microbatches of this size."""

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        """See `groupwise.training.private_step.BatchSums`.

        Where memory runs out, the batch is begun again with half as many examples at a time, and where an example has
        to be left out and rows were not masked, with masks; nothing has been released yet, and the step's noise is what
        it would have been.
        """
        share, engine = self.share(drawn, private.ranks), private.engine
        if engine is not None:
            engine.masks_rows = private.in_shards  # others wait for messages: no batch is begun again there
        while True:
            try:
                private.clear()
                loss = self._through(private, step, share, drawn)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
            else:
                if engine is None or not engine.spoiled:
                    return loss
                engine.masks_rows = True
                continue
            self._halve(private)  # once the error is gone, and what it held

    def parts(
        self, private: PrivateStep, share: np.ndarray, drawn: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, bool]]:
        """The microbatches of a share: where each begins, its examples, and whether it is a filler.

        In shards all processes run as many, as each needs the others' parts of the parameters; who has no more examples
        takes the batch's first, as a filler.
        """
        most = -(-len(drawn) // private.ranks.replicas) if private.in_shards else len(share)
        for start in range(0, most, self.size):
            rows = share[start : start + self.size]
            yield start, rows if len(rows) else drawn[:1], not len(rows)

    def _through(self, private: PrivateStep, step: int, share: np.ndarray, drawn: np.ndarray) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=private.device)
        self.begin(private, step)
        for start, rows, filler in self.parts(private, share, drawn):
            with private.microbatch(step, start):
                losses = self.run(private, step, start, rows, filler)
            if not filler:
                total += losses.sum()
        self.end(private, step)
        return total

    def _halve(self, private: PrivateStep) -> None:
        """Go on with half as many examples at a time, since memory has run out.

        Raises:
            UserError: there is no less, or other processes wait for this one.
        """
        if private.in_shards:
            raise UserError(f"Microbatches of {self.size} do not fit into memory: use a smaller microbatch.")
        if self.size == 1:
            raise UserError("One example does not fit into memory: use a smaller model.")
        self.forget()
        if private.device.type == "cuda":
            private.clear()
            torch.cuda.empty_cache()  # pieces that halves do not fit into
        self.size //= 2
        print(f"warning: memory ran out; going on with {self.size} examples at once.", file=sys.stderr)
