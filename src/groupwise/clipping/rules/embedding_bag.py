"""Clips bags of embeddings (`F.embedding_bag`, `nn.EmbeddingBag`), which are sums, means or maxima of embeddings.

Bags get one length; what is not there counts nothing. With offsets the first axis of the input is no batch: an example
is a bag, and there are as many as offsets (less the last, where the module includes it).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.per_example import in_place_of
from groupwise.clipping.products import refuse_options
from groupwise.errors import UserError


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
    rows = F.embedding(input, weight, padding_idx)
    rows = rows if counts is None else rows * counts.unsqueeze(2)
    total = (rows if inside is None else rows.masked_fill(~inside.unsqueeze(2), 0)).sum(1)
    if mode == "sum":
        return total
    return total / (max(input.shape[1], 1) if inside is None else inside.sum(1, keepdim=True).clamp_min(1))


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
