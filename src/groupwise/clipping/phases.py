"""Says what a backward pass is for, and compares ghost clipping's two where a checkpoint computes again in each.

The factors of the second pass are of the norms of the first: a mask that is drawn again in between (a checkpoint with
`preserve_rng_state=False`, a generator of one's own) would release sums that nothing bounds.
"""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from groupwise.errors import UserError


class Phase(Enum):
    """The work of a backward pass: all at once, only norms (ghost, first), only sums (second)."""

    CLIP = "clip"
    NORMS = "norms"
    SUMS = "sums"


class Recomputed:
    """What the layers of a group received in both passes, two numbers a row."""

    def __init__(self) -> None:
        self.on = False
        """Whether a checkpoint has computed something once more."""
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []

    def note(self, phase: Phase, tensors: Sequence[Tensor | None]) -> None:
        """A layer received output gradients and what it had kept."""
        if not self.on or phase not in (Phase.NORMS, Phase.SUMS):
            return
        prints = self._second if phase is Phase.SUMS else self._first
        for t in tensors:
            if t is not None and t.is_floating_point() and t.dim() > 0:
                rows = t.detach().reshape(len(t), -1)
                lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
                prints.append(torch.stack([rows.sum(1, dtype=torch.float64), lengths]))

    def check(self) -> None:
        """Compare the passes; what came before the first recomputation of the first pass was there in both.

        Raises:
            UserError: they differ by more than rounding.
        """
        if not self._second:  # norms alone were asked
            return
        pairs = list(zip(self._first, self._second[len(self._second) - len(self._first) :], strict=True))
        same = [((one - two).abs() <= 1e-3 * one[1]) | (one == two) | one.isnan() for one, two in pairs]
        if same and not bool(torch.stack([each.all() for each in same]).all()):
            raise UserError(
                "Activation checkpointing gave other numbers in the second backward pass of ghost clipping than in "
                "the first, whose norms bound nothing then: let it keep torch's random state (preserve_rng_state), "
                "draw from torch's own generator, or clip flat."
            )
