"""Clips bags of embeddings: the rows of a bag have one output gradient, times their counts, so none is formed.

`nn.EmbeddingBag` becomes bags of one length, in which what is not there counts nothing. With offsets the first axis of
its input is no batch: an example is a bag, and there are as many as offsets (less the last, where the module is told to
include it).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import drop_zero_rows, scale_rows
from groupwise.clipping.precision import floor, raised, squared_row_norms, upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted
from groupwise.clipping.rules.embedding import EmbeddingRule, distinct, refuse_embedding, slack_of_repeats
from groupwise.clipping.rules.weights import Forward, Weights
from groupwise.errors import UserError


class BagRule(EmbeddingRule):
    """Sums of rows, y_e = Σ_l c_el W[x_el] over the places l of bag e: weight (V, d).

    With s_ev = Σ_{l: x_el = v} c_el an example's gradient is SᵀG for its output gradients G (E, d); of one bag, as is
    usual, its norm is ‖s‖‖g‖. The output is (B·E, 1, d), which has as many axes as the rows of an embedding have.
    `saved` is (x, c like x, or None where all are 1).
    """

    batched: ClassVar[tuple[int, ...]] = (0, 1)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, counts = parameters
        assert weight is not None
        padding = self.module.padding_idx
        y = F.embedding_bag(x, weight, mode="sum", per_sample_weights=counts, padding_idx=padding)
        return y.unsqueeze(1), (x, counts)

    def bags(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x and c (B, E, L), 0 at padding, and output gradients (B, E, d)."""
        x, counts = saved
        assert x is not None
        g = upcast(g)
        counts = g.new_ones(()).expand(x.shape) if counts is None else counts.to(g.dtype)
        if self.module.padding_idx is not None:
            counts = counts.masked_fill(x == self.module.padding_idx, 0)
        x, counts = (t if t.dim() == 3 else t.unsqueeze(1) for t in (x, counts))
        return x, counts, g.flatten(1, -2)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (B, E·L) and the gradients of the rows there, (B, E·L, d)."""
        x, counts, g = self.bags(saved, g)
        return x.flatten(1), (counts.unsqueeze(3) * g.unsqueeze(2)).flatten(1, 2)

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """All bags of an example, as long as the longest of them."""
        parts = [self.bags(saved, g) for saved, g in calls]
        longest = max(x.shape[2] for x, _, _ in parts)
        x, counts = (torch.cat([F.pad(part[i], (0, longest - part[i].shape[2])) for part in parts], 1) for i in (0, 1))
        return (x, counts), torch.cat([g for _, _, g in parts], 1)

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        x, counts, g = self.bags(saved, g)
        places = distinct(x.flatten(1))
        sums = counts.new_zeros(*x.shape[:2], x[0].numel()).scatter_add_(2, places.view(x.shape), counts)
        lengths = counts.double().abs() * torch.linalg.vector_norm(g, dim=2, dtype=torch.float64).unsqueeze(2)
        slack = slack_of_repeats(places, lengths.flatten(1), g.dtype)
        if x.shape[1] == 1:
            return raised(squared_row_norms(sums) * (squared_row_norms(g) + floor(g)), slack)
        return raised(squared_row_norms(sums.mT @ g), slack)

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        x, counts, g = self.bags(saved, g)
        alike = saved[1] is None and self.module.padding_idx is None
        kept = None if alike else drop_zero_rows(factors, counts).flatten()
        g = scale_rows(g, factors).flatten(0, 1)
        bags = torch.arange(len(g), device=g.device)
        owners, sizes, no = bags.repeat_interleave(x.shape[2]), torch.full_like(bags, x.shape[2]), bags[:0]
        backward = torch.ops.aten._embedding_bag_dense_backward
        return (backward(g, x.flatten(), owners, sizes, no, self.module.num_embeddings, False, 0, kept),)


def embedding_bag(
    weights: Weights,
    module: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """What `nn.EmbeddingBag` computes.

    Args:
        weights: the uses of the module's parameters.
        module: the layer.
        input: indices, (B, L), or (N,) with offsets.
        offsets: where each bag begins in the input, (B,), or (B + 1,) with `include_last_offset`.
        per_sample_weights: factors of the rows, like the input; for mode "sum".

    Returns:
        Sums, means or maxima over the bags, (B, d); zeros for an empty one.

    Raises:
        UserError: shapes that do not fit, factors for another mode, or what `refuse_embedding` names.
    """
    reason = refuse_embedding(module)
    if reason:
        raise UserError(f"EmbeddingBag cannot be clipped: {reason}.")
    if per_sample_weights is not None and (module.mode != "sum" or per_sample_weights.shape != input.shape):
        raise UserError(
            f"EmbeddingBag got per_sample_weights of {tuple(per_sample_weights.shape)} with mode={module.mode!r}: they "
            f"go with mode='sum', one for each of the input's {tuple(input.shape)}."
        )
    if input.dim() != (2 if offsets is None else 1):
        raise UserError(
            f"EmbeddingBag got an input of shape {tuple(input.shape)} with{'out' * (offsets is None)} offsets: "
            "give two axes, bags by places, or one axis and offsets."
        )
    counts, padding, inside = per_sample_weights, module.padding_idx, None
    input = input.long()  # the kernel of the weight's gradient has one type for indices, owners and sizes
    if offsets is not None:
        places, inside = _places(input, offsets, module.include_last_offset)
        input = torch.where(inside, F.pad(input, (0, 1), value=padding or 0)[places], padding or 0)
        counts = None if counts is None else F.pad(counts, (0, 1))[places]
    if padding is not None:
        inside = (input != padding) if inside is None else inside & (input != padding)
    if module.mode == "max":
        return _maxima(weights.embedding(input, "weight", padding), inside)
    if counts is not None and counts.requires_grad:
        rows = weights.embedding(input, "weight", padding) * counts.unsqueeze(2)
        return rows.sum(1) if inside is None else rows.masked_fill(~inside.unsqueeze(2), 0).sum(1)
    if counts is None and inside is not None and padding is None:
        counts = inside.to(module.weight.dtype)
    total = weights.bags(input, counts, "weight", padding)
    if module.mode == "sum":
        return total
    return total / (max(input.shape[1], 1) if inside is None else inside.sum(1, keepdim=True).clamp_min(1))


EMBEDDING_BAG: dict[type[nn.Module], Forward] = {nn.EmbeddingBag: embedding_bag}


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
