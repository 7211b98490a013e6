"""What is known of a logical batch: how many examples, how many of them within each threshold, how many left out."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from groupwise.clipping.factors import may_ask
from groupwise.clipping.squared_norms import LEAST_SQUARE
from groupwise.errors import UserError


class Counts:
    """Counts on the device of the norms, so that nothing waits for a value.

    Args:
        groups: K.
        like: a tensor on the device, with the dtype, that thresholds have.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        self.examples = 0
        self.at = torch.ones(groups, dtype=like.dtype, device=like.device)
        """The thresholds that counts are taken at, (K,)."""
        self.within = torch.zeros(groups, dtype=torch.int64, device=like.device)
        self.left_out = torch.zeros_like(self.within)

    def add(self, squared_norms: Mapping[int, Tensor], examples: int) -> None:
        """Count the squared norms (examples,) of all K groups at once."""
        squares = self._stack(squared_norms)
        norms = squares.clamp_min(0).sqrt_()
        self.within += (norms <= self.at.to(norms.dtype).unsqueeze(1)).sum(1)
        self.left_out += (~(squares.to(self.at.dtype) < math.inf)).sum(1)  # as `GroupState.factors` has it
        self.examples += examples

    def check_fillers(self, squared_norms: Mapping[int, Tensor], absent: int, wait: bool) -> None:
        """Refuse a filler with a gradient: an example that is there twice moves a sum by twice the threshold.

        On other devices than a CPU it looks only if it may `wait`.
        """
        tails = self._stack({k: squares[-absent:] for k, squares in squared_norms.items()})
        if (wait or may_ask(tails)) and bool(((tails > LEAST_SQUARE) & (tails < math.inf)).any()):
            raise UserError(f"The last {absent} examples of the microbatch are fillers: multiply their losses by 0.")

    def reset(self) -> None:
        """Begin again."""
        self.examples = 0
        self.within.zero_()
        self.left_out.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is counted inside is forgotten."""
        before = self.examples, self.within.clone(), self.left_out.clone()
        try:
            yield
        finally:
            self.examples, self.within, self.left_out = before

    def _stack(self, squared_norms: Mapping[int, Tensor]) -> Tensor:
        return torch.stack([squared_norms[k].to(self.within.device) for k in range(len(self.within))])
