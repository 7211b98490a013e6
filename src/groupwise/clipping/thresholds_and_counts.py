"""Holds a model's clipping groups, the thresholds that are in force, and the counts of a batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import RELATIONS, Sensitivity, is_async_device
from groupwise.clipping.groups import ClippingGroup, clip_factors_of, one_each
from groupwise.clipping.partition import Partition
from groupwise.errors import UserError


class ThresholdsAndCounts:
    """The groups of a partition, with their thresholds and counts: what an engine's passes read and write.

    Args:
        model: the model.
        partition: which of its layers are clipped together.
        groups: those of the partition.
        table: their thresholds, (K,), of which each has its entry.
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
        """How many norms were within the thresholds, and how many were not finite: on the device of the norms."""
        self._read: Tensor | None = None
        self._unmasked = False
        self.examples = 0
        """Examples since `reset`, fillers among them."""

    @property
    def thresholds(self) -> Tensor:
        """C_k that clips, (K,)."""
        return self._table.clone()

    @property
    def count_thresholds(self) -> Tensor:
        """The thresholds that counts are taken at, (K,)."""
        return self._count_at.clone()

    def set_thresholds(
        self, clip: float | Sequence[float] | Tensor, count: Sequence[float] | Tensor | None = None
    ) -> None:
        """Set the thresholds that clip and, where they differ, those that the counts are taken at; both (K,).

        Raises:
            UserError: not one finite positive number a group.
        """
        values = one_each(len(self.groups), clip)
        self._clip = values
        self._count_at.copy_(values if count is None else one_each(len(self.groups), count))
        self._table.copy_(values)

    def sensitivity(self, relation: str) -> Sensitivity:
        """How far one example moves the clipped sums that are in .grad since `reset`; the noise is scaled by it.

        Its thresholds are the largest that clipped. .grad must have been cleared when the batch began.

        Args:
            relation: which batches are neighbours, by the name that the privacy plan uses: "add_remove".

        Raises:
            UserError: a relation for which no bound is proven; sums that are `has_nonfinite`.
        """
        if self.has_nonfinite:
            raise UserError("A norm is not finite and masks_rows was False: begin the batch again with True.")
        if relation not in RELATIONS:
            raise UserError(
                f"relation={relation!r} is unknown: a bound is proven for {RELATIONS[0]!r} (one example more or less)."
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
        """Examples left out since `reset` because a norm was not finite (the most over groups)."""
        return int(self._on_host()[1].max())

    def _on_host(self) -> Tensor:
        """The host waits for the device once, whatever is asked."""
        if self._read is None:
            self._read = self._totals.cpu()
        return self._read

    @property
    def masks_rows(self) -> bool:
        """Whether rows of examples that are left out become zeros first (0 · NaN is NaN), which copies all rows on a
        GPU; a CPU looks. Who can begin a batch again sets it to False, and to True for one that was `has_nonfinite`."""
        return self.groups[0].masks

    @masks_rows.setter
    def masks_rows(self, masks: bool) -> None:
        for group in self.groups:
            group.masks = masks

    @property
    def has_nonfinite(self) -> bool:
        """Whether sums since `reset` may hold what is no number: an example was left out, and rows were not masked."""
        return self._unmasked and bool(self._on_host()[1].any())

    @property
    def per_example_norms(self) -> Tensor:
        """‖g_k^(i)‖ of the last microbatch, (K, B); not private."""
        return torch.stack([self.squared_norms[k] for k in range(len(self.groups))]).clamp_min(0).sqrt()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs backward inside leaves no mark on `counts`, `nonfinite` and `examples`."""
        before, totals = (self.examples, self._clipped, self._read, self._unmasked), self._totals.clone()
        try:
            yield
        finally:
            self.examples, self._clipped, self._read, self._unmasked = before
            self._totals.copy_(totals)

    def factors(self, squared_norms: Tensor, group: int = 0) -> Tensor:
        """Clip factors (n,) for squared norms (n,) at the group's threshold; 0 where a norm is not finite."""
        return clip_factors_of([self.groups[group]], [squared_norms])[0].values

    def count_norms(self, squared_norms: Tensor) -> None:
        """Count the examples of a whole batch by squared norms (K, n) from elsewhere, as of all stages of a pipeline.

        Raises:
            UserError: not one row a group.
        """
        if squared_norms.dim() != 2 or len(squared_norms) != len(self.groups):
            raise UserError(
                f"Squared norms of shape {tuple(squared_norms.shape)} were given for {len(self.groups)} groups: give "
                "one row a group, one column an example."
            )
        self._count(dict(enumerate(squared_norms)), squared_norms.shape[1])

    def _reset_counts(self) -> None:
        self.examples, self._clipped, self._read, self._unmasked = 0, None, None, False
        self._totals.zero_()

    def _begin_clipping(self) -> None:
        """A backward pass with the thresholds in force adds to the parameters' gradients."""
        self._unmasked |= not self.masks_rows and is_async_device(self._totals)
        self._clipped = self._clip if self._clipped is None else torch.maximum(self._clipped, self._clip)

    def _count(self, squared_norms: dict[int, Tensor], examples: int, present: Tensor | None = None) -> None:
        """Count the squared norms (examples,) of all K groups at once, on the device, so that nothing waits.

        A filler's is never within the thresholds; one that is not finite counts, as the sums hold it.
        """
        self.squared_norms = squared_norms
        squares = torch.stack([squared_norms[k] for k in range(len(self.groups))])
        norms = squares.clamp_min(0).sqrt_()
        self._read = None
        within = norms <= self._count_at.to(norms.dtype).unsqueeze(1)
        self._totals[0] += (within if present is None else within & present).sum(1)
        self._totals[1] += (~(squares.to(self._count_at.dtype).abs() < math.inf)).sum(1)  # as `keep_finite` has it
        self.examples += examples

    def repeated(self, examples: int) -> None:
        """Note that a CUDA graph of `backward` ran, recorded with this `masks_rows` and gradients in this memory."""
        self._begin_clipping()
        self._read = None
        self.examples += examples
