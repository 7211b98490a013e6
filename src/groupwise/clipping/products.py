"""Clips products and embeddings of parameters that a module uses directly by layer rules, without copies.

This includes torch's attention and bags of embeddings, which consist of such operations.
"""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.clip_plan import Order
from groupwise.clipping.per_example import PerExample, in_place_of, refuse_unbatched
from groupwise.errors import UserError


@in_place_of(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. A bias that is computed, or in another group, is added to the product."""
    if bias is None or (isinstance(weight, PerExample) and weight.pairs(bias)):
        return _product(input, weight, bias)
    made = _product(input, weight) if isinstance(weight, PerExample) else F.linear(input, weight)
    return made if made is NotImplemented else made + bias.to(made.dtype)


@in_place_of(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """x W, or W x if the batch axis of x is not one of its last two."""
    if isinstance(other, PerExample):
        return _product(input, other.mT) if other.is_matrix else NotImplemented
    if other.dim() < 3:
        return NotImplemented
    made = _product(other.mT, input, batch_axes=other.dim() - 2)
    return made if made is NotImplemented else made.mT


@in_place_of(F.embedding)
def embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table; see also `refuse_options`."""
    refuse_options(weight, max_norm, scale_grad_by_freq, sparse)
    if isinstance(input, PerExample) or not weight.is_matrix or weight.transposed:
        return NotImplemented
    rows: Tensor = weight.origin.embedding(weight, input, padding_idx, weight.origin.find(input, meets=False))
    return rows


_TORCHS: Any = F.multi_head_attention_forward
_ATTENTION = FunctionType(
    _TORCHS.__code__, _TORCHS.__globals__ | {"has_torch_function": lambda tensors: False}, argdefs=_TORCHS.__defaults__
)
"""torch's own code without its `__torch_function__` dispatch, so that each operation inside is dispatched instead."""


@in_place_of(F.multi_head_attention_forward)
def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """torch's `F.multi_head_attention_forward`, with each of its products clipped; inputs need a batch axis."""
    for x in (query, key, value):
        refuse_unbatched("MultiheadAttention", x, 3)
    made: tuple[Tensor, Tensor | None] = _ATTENTION(query, key, value, *args, **kwargs)
    return made


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
    """torch's `F.embedding_bag` for sums and means of embeddings; mode "max" uses copies.

    Indices (B, L) into a table (V, d) give (B, d), with zeros for an empty bag. In mode "sum" the rows may have
    factors, `per_sample_weights` (B, L). Raises a `UserError` for offsets, other shapes, or an option that cannot be
    clipped.
    """
    factors = per_sample_weights is None or (mode == "sum" and per_sample_weights.shape == input.shape)
    if offsets is not None or input.dim() != 2 or not factors:
        raise UserError(
            f"EmbeddingBag got an input of shape {tuple(input.shape)} with{'out' * (offsets is None)} offsets, in mode "
            f"{mode!r}: give bags as rows, (B, L), filled up with padding_idx; no offsets; and per_sample_weights "
            "of the input's shape, for mode 'sum' alone."
        )
    refuse_options(weight, max_norm, scale_grad_by_freq, sparse)
    if mode == "max":
        return NotImplemented
    input = input.long()  # the kernel needs a single index dtype
    inside = None if padding_idx is None else input != padding_idx
    rows = F.embedding(input, weight, padding_idx)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(2)
    total = (rows if inside is None else rows.masked_fill(~inside.unsqueeze(2), 0)).sum(1)
    if mode == "sum":
        return total
    return total / (max(input.shape[1], 1) if inside is None else inside.sum(1, keepdim=True).clamp_min(1))


def refuse_options(weight: Any, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    """Raise a `UserError` for options of an embedding that cannot be clipped."""
    if isinstance(weight, PerExample) and (max_norm or scale_grad_by_freq or sparse):
        raise UserError(
            f"{weight.origin.label} goes into an embedding with max_norm (which rewrites rows in the forward pass), "
            "scale_grad_by_freq (which mixes examples) or sparse gradients (which get no noise): leave the option out."
        )


def _product(x: Tensor, weight: Any, bias: Tensor | None = None, batch_axes: int | None = None) -> Any:
    """x Wᵀ + b by the rule of linear layers for x (..., d), W (p, d) and b (p,) of the same group; or `NotImplemented`.

    `batch_axes` is how many leading axes of x may be the batch axis, by default all but the last.
    """
    if not isinstance(weight, PerExample) or not weight.is_matrix or x.dim() < 2 or not x.numel():
        return NotImplemented
    layout = None
    if not isinstance(x, PerExample):
        layout = weight.origin.find(x, meets=False)
        axes = x.dim() - 1 if batch_axes is None else batch_axes
        if layout.order is not Order.SHARED and (layout.axis >= axes or (layout.axis and layout.rows_per_example > 1)):
            return NotImplemented
    return weight.origin.linear(weight, x, bias, layout)
