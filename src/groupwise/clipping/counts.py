"""Counts the examples of a logical batch within each threshold, and says how far one of them moves the clipped sums."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import is_sync_free
from groupwise.clipping.precision import LEAST_SQUARE
from groupwise.errors import UserError

RELATIONS = ("add_remove",)
"""Pairs of data sets that a sensitivity is known for: one has an example more."""


@dataclass(frozen=True)
class Sensitivity:
    """How far one example moves the clipped sums of a logical batch; what the noise is scaled by.

    Formal guarantee: between two batches in `relation`, the sum in the .grad of group k's parameters differs by at most
    `thresholds[k]` in ℓ2, jointly over the group. An example is in one microbatch of one replica, so the same holds for
    the sum over all of them.
    """

    relation: str
    groups: tuple[tuple[nn.Parameter, ...], ...]
    """The parameters of each group, K tuples."""
    thresholds: Tensor
    """C_k, (K,) float64 on the CPU: the largest in force in any backward pass of the batch."""

    @property
    def total(self) -> float:
        """(Σ_k C_k²)^½: how far it moves all groups together."""
        return float(self.thresholds.square().sum().sqrt())


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
        self._clip = torch.ones(groups, dtype=torch.float64)
        self._clipped: Tensor | None = None

    def set_thresholds(self, clip: Tensor, count: Tensor) -> None:
        """The thresholds that clip from now on, and those that counts are taken at, (K,) float64 both."""
        self._clip = clip
        self.at.copy_(count)

    def begin_clipping(self) -> None:
        """A backward pass with the thresholds in force adds to the parameters' gradients."""
        self._clipped = self._clip if self._clipped is None else torch.maximum(self._clipped, self._clip)

    @property
    def clipped(self) -> Tensor:
        """The largest thresholds (K,) that clipped since `reset`; those in force, if none did."""
        return (self._clip if self._clipped is None else self._clipped).clone()

    def add(self, squared_norms: Mapping[int, Tensor], examples: int) -> None:
        """Count the squared norms (examples,) of all K groups at once."""
        squares = self._stack(squared_norms)
        norms = squares.clamp_min(0).sqrt_()
        self.within += (norms <= self.at.to(norms.dtype).unsqueeze(1)).sum(1)
        self.left_out += (~(squares.to(self.at.dtype) < math.inf)).sum(1)  # as `ClippingGroup.factors` has it
        self.examples += examples

    def check_fillers(self, squared_norms: Mapping[int, Tensor], absent: int, wait: bool) -> None:
        """Refuse a filler with a gradient: an example that is there twice moves a sum by twice the threshold.

        On other devices than a CPU it looks only if it may `wait`.
        """
        tails = self._stack({k: squares[-absent:] for k, squares in squared_norms.items()})
        if (wait or is_sync_free(tails)) and bool(((tails > LEAST_SQUARE) & (tails < math.inf)).any()):
            raise UserError(f"The last {absent} examples of the microbatch are fillers: multiply their losses by 0.")

    def reset(self) -> None:
        """Begin again."""
        self.examples, self._clipped = 0, None
        self.within.zero_()
        self.left_out.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is counted inside is forgotten."""
        before = self.examples, self._clipped, self.within.clone(), self.left_out.clone()
        try:
            yield
        finally:
            self.examples, self._clipped, self.within, self.left_out = before

    def _stack(self, squared_norms: Mapping[int, Tensor]) -> Tensor:
        return torch.stack([squared_norms[k].to(self.within.device) for k in range(len(self.within))])
