"""Holds a model's clipping groups, their current thresholds, and the counts of a batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import Sensitivity, is_async_device
from groupwise.clipping.group_pass import clip_factors_of
from groupwise.clipping.groups import ClippingGroup, one_each
from groupwise.clipping.partition import Partition
from groupwise.errors import UserError


class ThresholdsAndCounts:
    """The groups of a partition with their thresholds and counts; the base class of the engine.

    Each group holds a view of its entry in the `table` of thresholds, (K,).
    """

    def __init__(
        self, model: nn.Module, partition: Partition, groups: tuple[ClippingGroup, ...], table: Tensor
    ) -> None:
        self.model, self.partition, self.groups, self._table = model, partition, groups, table
        self.squared_norms: dict[int, Tensor] = {}
        """‖g_k^(i)‖² of the last microbatch by group, (B,) each."""
        self._clip = torch.ones(len(partition), dtype=torch.float64)
        self._clipped: Tensor | None = None
        self._count_at = torch.ones_like(self._table)
        self._totals = torch.zeros(2, len(partition), dtype=torch.int64, device=self._table.device)
        """By group, the norms within the count threshold and the norms that are not finite; on the norms' device."""
        self._read: Tensor | None = None
        self._unmasked = False
        self.examples = 0
        """Examples since `reset`, filler rows included."""

    @property
    def thresholds(self) -> Tensor:
        """The clipping thresholds C_k, (K,)."""
        return self._table.clone()

    @property
    def count_thresholds(self) -> Tensor:
        """The thresholds that norms are compared with for the counts, (K,)."""
        return self._count_at.clone()

    def set_thresholds(
        self, clip: float | Sequence[float] | Tensor, count: Sequence[float] | Tensor | None = None
    ) -> None:
        """Set the clipping thresholds, and the count thresholds if they differ; both (K,).

        Raises:
            UserError: not one finite positive number per group.
        """
        self._clip = one_each(len(self.groups), clip)
        self._count_at.copy_(self._clip if count is None else one_each(len(self.groups), count))
        self._table.copy_(self._clip)

    def sensitivity(self, relation: str) -> Sensitivity:
        """The sensitivity of the sums that were added to .grad since `reset`, which the noise is scaled to.

        Its thresholds are the largest that clipped. .grad must have been cleared when the batch began.

        Args:
            relation: which batches are neighbours, by the name in the privacy plan: "add_remove".

        Raises:
            UserError: no bound is proven for this relation; the sums are `has_nonfinite`.
        """
        if self.has_nonfinite:
            raise UserError("A norm is not finite and masks_rows was False: begin the batch again with True.")
        if relation != "add_remove":
            raise UserError(
                f"relation={relation!r} is unknown: a bound is proven for 'add_remove' (one example more or less)."
            )
        return Sensitivity(
            relation,
            tuple(group.parameters for group in self.groups),
            (self._clip if self._clipped is None else self._clipped).clone(),
        )

    @property
    def counts(self) -> Tensor:
        """b̄_k: how many examples since `reset` had ‖g_k‖ <= the count threshold, (K,) float64 on the CPU."""
        return self._on_host()[0].double()

    @property
    def nonfinite(self) -> int:
        """How many examples were left out since `reset` because a norm was not finite (maximum over groups)."""
        return int(self._on_host()[1].max())

    def _on_host(self) -> Tensor:
        """The totals on the CPU; they are copied, and the device synchronised, at most once per batch."""
        if self._read is None:
            self._read = self._totals.cpu()
        return self._read

    @property
    def masks_rows(self) -> bool:
        """On a GPU, whether rows of dropped examples are set to zero (0 · NaN is NaN); this copies all rows. To save
        the copy, set it to False, and repeat a batch that `has_nonfinite` with True."""
        return self.groups[0].masks

    @masks_rows.setter
    def masks_rows(self, masks: bool) -> None:
        for group in self.groups:
            group.masks = masks

    @property
    def has_nonfinite(self) -> bool:
        """Whether the sums since `reset` may hold NaN: an example's norm was not finite, and rows were not masked."""
        return self._unmasked and bool(self._on_host()[1].any())

    @property
    def per_example_norms(self) -> Tensor:
        """‖g_k^(i)‖ of the last microbatch, (K, B); not private."""
        return torch.stack([self.squared_norms[k] for k in range(len(self.groups))]).clamp_min(0).sqrt()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Backward passes inside do not change `counts`, `nonfinite` and `examples`."""
        before, totals = (self.examples, self._clipped, self._read, self._unmasked), self._totals.clone()
        try:
            yield
        finally:
            self.examples, self._clipped, self._read, self._unmasked = before
            self._totals.copy_(totals)

    def factors(self, squared_norms: Tensor, group: int = 0) -> Tensor:
        """Clip factors (n,) for squared norms (n,) at the group's threshold; 0 for a norm that is not finite."""
        return clip_factors_of([self.groups[group]], [squared_norms])[0].values

    def count_norms(self, squared_norms: Tensor) -> None:
        """Count the examples of a batch by given squared norms (K, n), such as the sums over all pipeline stages.

        Raises:
            UserError: not one row per group.
        """
        if squared_norms.dim() != 2 or len(squared_norms) != len(self.groups):
            raise UserError(
                f"Squared norms of shape {tuple(squared_norms.shape)} were given for {len(self.groups)} groups: give "
                "one row per group, one column per example."
            )
        self._count(dict(enumerate(squared_norms)), squared_norms.shape[1])

    def _begin_clipping(self) -> None:
        """Note that a backward pass begins with the current thresholds."""
        self._unmasked |= not self.masks_rows and is_async_device(self._totals)
        self._clipped = self._clip if self._clipped is None else torch.maximum(self._clipped, self._clip)

    def _count(self, squared_norms: dict[int, Tensor], examples: int, present: Tensor | None = None) -> None:
        """Count the squared norms (examples,) of all K groups at once, on the device, without synchronising.

        A filler row never counts as within a threshold. It does count as not finite, since it is in the sums.
        """
        self.squared_norms = squared_norms
        squares = torch.stack([squared_norms[k] for k in range(len(self.groups))])
        norms = squares.clamp_min(0).sqrt_()
        self._read = None
        within = norms <= self._count_at.to(norms.dtype).unsqueeze(1)
        within = within if present is None else within & present
        nonfinite = ~(squares.to(self._count_at.dtype).abs() < math.inf)  # as `keep_finite` has it
        self._totals += torch.stack([within, nonfinite]).sum(2)
        self.examples += examples

    def repeated(self, examples: int) -> None:
        """Note that a CUDA graph of `backward` ran; it must have been captured with the current `masks_rows`."""
        self._begin_clipping()
        self._read = None
        self.examples += examples
