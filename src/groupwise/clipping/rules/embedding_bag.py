"""Clips bags of embeddings (`F.embedding_bag`, `nn.EmbeddingBag`): the rows of a bag have one output gradient.

Bags get one length; what is not there counts nothing. With offsets the first axis of the input is no batch: an example
is a bag, and there are as many as offsets (less the last, where the module includes it).
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.factors import drop_zero_rows, scale_rows
from groupwise.clipping.per_example import PerExample, in_place_of
from groupwise.clipping.precision import floor, inflate_norms, squared_row_norms, upcast
from groupwise.clipping.products import refuse_options
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted
from groupwise.clipping.rules.embedding import EmbeddingRule, distinct, slack_of_repeats
from groupwise.errors import UserError


class BagRule(EmbeddingRule):
    """Sums of rows, y = Σ_l c_l W[x_l] over the places l of a bag: weight (V, d).

    With s_v = Σ_{l: x_l = v} c_l the gradient of a bag is s gᵀ for its output gradient g, of norm ‖s‖‖g‖. The output is
    (B, 1, d), with as many axes as the rows of an embedding. `saved` is (x, c like x, or None where all are 1).
    """

    batched: ClassVar[tuple[int, ...]] = (0, 1)
    stacks: ClassVar[bool] = False

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, counts = parameters
        assert weight is not None
        padding = self.module.padding_idx
        y = F.embedding_bag(x, weight, mode="sum", per_sample_weights=counts, padding_idx=padding)
        return y.unsqueeze(1), (x, counts)

    def counts(self, saved: Saved, g: Tensor) -> Tensor:
        """c like x, 0 at padding."""
        x, counts = saved
        assert x is not None
        counts = g.new_ones(()).expand(x.shape) if counts is None else counts.to(g.dtype)
        padding = self.module.padding_idx
        return counts if padding is None else counts.masked_fill(x == padding, 0)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (B, T) and the gradients of the rows there, (B, T, d), of all bags of an example."""
        x, g = saved[0], upcast(g)
        assert x is not None
        return x.flatten(1), (self.counts(saved, g).unsqueeze(-1) * g).flatten(1, -2)

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        x = saved[0]
        if x is None or x.dim() > 2:  # several bags of an example
            return super().squared_norms(saved, g, wanted, context)
        g = upcast(g).squeeze(1)
        counts, places = self.counts(saved, g), distinct(x)
        sums = counts.new_zeros(x.shape).scatter_add_(1, places, counts)
        lengths = counts.double().abs() * torch.linalg.vector_norm(g, dim=1, keepdim=True, dtype=torch.float64)
        squares = squared_row_norms(sums) * (squared_row_norms(g) + floor(g[0].numel(), g.dtype))
        return inflate_norms(squares, slack_of_repeats(places, lengths, g.dtype))

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        x, g = saved[0], upcast(g)
        assert x is not None
        alike = saved[1] is None and self.module.padding_idx is None
        kept = None if alike else drop_zero_rows(factors, self.counts(saved, g)).flatten()
        g = scale_rows(g, factors).flatten(0, -2)
        bags = torch.arange(len(g), device=g.device)
        owners, sizes = bags.repeat_interleave(x.shape[-1]), torch.full_like(bags, x.shape[-1])
        backward, size = torch.ops.aten._embedding_bag_dense_backward, self.module.num_embeddings
        return (backward(g, x.flatten(), owners, sizes, bags[:0], size, False, 0, kept),)


@in_place_of(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """What the function of torch computes, from the same arguments.

    Args:
        input: indices, (B, L), or (N,) with offsets.
        weight: the table (V, d).
        offsets: where each bag begins in the input, (B,), or (B + 1,) with `include_last_offset`.
        per_sample_weights: factors of the rows, like the input; for mode "sum".

    Returns:
        Sums, means or maxima over the bags, (B, d); zeros for an empty one.

    Raises:
        UserError: shapes that do not fit, or an option that cannot be clipped.
    """
    factors = per_sample_weights is None or (mode == "sum" and per_sample_weights.shape == input.shape)
    if input.dim() != (2 if offsets is None else 1) or not factors:
        raise UserError(
            f"EmbeddingBag got an input of shape {tuple(input.shape)} with{'out' * (offsets is None)} offsets, in mode "
            f"{mode!r}: give two axes, bags by places, or one axis and offsets; per_sample_weights like the input, and "
            "for mode 'sum' alone."
        )
    refuse_options(weight, max_norm, scale_grad_by_freq, sparse)
    inside, counts, input = None, per_sample_weights, input.long()  # the kernel has one type for all numbers
    if offsets is not None:
        places, inside = _places(input, offsets, include_last_offset)
        input = torch.where(inside, F.pad(input, (0, 1))[places], padding_idx or 0)
        counts = None if counts is None else F.pad(counts, (0, 1))[places]
    if padding_idx is not None:
        inside = (input != padding_idx) if inside is None else inside & (input != padding_idx)
    if mode == "max":
        return _maxima(F.embedding(input, weight, padding_idx), inside)
    total = None
    if isinstance(weight, PerExample) and weight.is_matrix and (counts is None or not counts.requires_grad):
        total = _by_rule(weight, input, counts, inside, padding_idx)
    if total is None:
        rows = F.embedding(input, weight, padding_idx)
        rows = rows if counts is None else rows * counts.unsqueeze(2)
        total = (rows if inside is None else rows.masked_fill(~inside.unsqueeze(2), 0)).sum(1)
    if mode == "sum":
        return total
    return total / (max(input.shape[1], 1) if inside is None else inside.sum(1, keepdim=True).clamp_min(1))


def _by_rule(
    weight: PerExample, x: Tensor, counts: Tensor | None, inside: Tensor | None, padding_idx: int | None
) -> Tensor | None:
    """Sums over bags by their rule; None where all examples share them."""
    layout = weight.origin.find(x, meets=False)
    if counts is None and inside is not None and padding_idx is None:
        counts = inside.to(weight.dtype)
    total: Tensor | None = None if layout.shared else weight.origin.bags(weight, x, counts, padding_idx, layout)
    return total


def _places(input: Tensor, offsets: Tensor, include_last: bool) -> tuple[Tensor, Tensor]:
    """Where the bags' parts are in an input of N, (B, longest), N where there is none; and whether there is one."""
    n = len(input)
    ends = offsets[1:] if include_last else torch.cat([offsets[1:], offsets.new_tensor([n])])
    starts = offsets[:-1] if include_last else offsets
    if offsets.dim() != 1 or len(starts) == 0:
        raise UserError(
            f"EmbeddingBag got offsets of shape {tuple(offsets.shape)}: give one for each bag, and with "
            "include_last_offset the end of the last."
        )
    shortest, longest, first, last = torch.stack([*torch.aminmax(ends - starts), starts[0], ends[-1]]).tolist()
    if shortest < 0 or first != 0 or last > n:
        raise UserError(
            f"EmbeddingBag got offsets that do not divide an input of {n}: they begin with 0 and never decrease."
        )
    steps = torch.arange(max(longest, 1), device=input.device)
    inside = steps < (ends - starts).unsqueeze(1)
    return torch.where(inside, starts.unsqueeze(1) + steps, n), inside


def _maxima(rows: Tensor, inside: Tensor | None) -> Tensor:
    """The maxima of rows (B, L, d) that are inside of bags, (B, L); 0 of none."""
    if inside is None:
        return rows.max(1).values
    most = rows.masked_fill(~inside.unsqueeze(2), -torch.inf).max(1).values
    return torch.where(inside.any(1, keepdim=True), most, 0.0)
