"""Does products and embeddings of parameters that modules read by the rules of such layers, without copies.

Attention and bags of embeddings are functions of torch that are made of such.
"""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.per_example import PerExample, in_place_of, refuse_unbatched
from groupwise.errors import UserError


@in_place_of(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b; a bias that is computed, or trains in another group, is added to the product."""
    if bias is None or _pairs(weight, bias):
        return _product(input, weight, bias)
    made = _product(input, weight) if isinstance(weight, PerExample) else F.linear(input, weight)
    return made if made is NotImplemented else made + bias.to(made.dtype)


@in_place_of(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """x W, or W x where x has the batch on another axis than its last two."""
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
    """Rows of a table.

    Raises:
        UserError: an option that cannot be clipped.
    """
    refuse_options(weight, max_norm, scale_grad_by_freq, sparse)
    if isinstance(input, PerExample) or not weight.is_matrix or weight.transposed:
        return NotImplemented
    rows: Tensor = weight.origin.embedding(weight, input, padding_idx, weight.origin.find(input, meets=False))
    return rows


_OWN: Any = F.multi_head_attention_forward
_ITSELF = FunctionType(
    _OWN.__code__, _OWN.__globals__ | {"has_torch_function": lambda tensors: False}, argdefs=_OWN.__defaults__
)
"""The same code, which runs where torch would hand the function over as a whole."""


@in_place_of(F.multi_head_attention_forward)
def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the function of torch computes, from the same arguments, with the products in it clipped one by one.

    Raises:
        UserError: an input without a batch.
    """
    for x in (query, key, value):
        refuse_unbatched("MultiheadAttention", x, 3)
    made: tuple[Tensor, Tensor | None] = _ITSELF(query, key, value, *args, **kwargs)
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
    """Sums or means of embeddings, as the function of torch computes them from the same arguments; maxima by copies.

    Args:
        input: indices (B, L).
        weight: the table (V, d).
        per_sample_weights: factors of the rows, like the input; for mode "sum".

    Returns:
        Sums or means over the bags, (B, d); zeros for an empty one.

    Raises:
        UserError: shapes that do not fit, or an option that cannot be clipped.
    """
    factors = per_sample_weights is None or (mode == "sum" and per_sample_weights.shape == input.shape)
    if offsets is not None or input.dim() != 2 or not factors:
        raise UserError(
            f"EmbeddingBag got an input of shape {tuple(input.shape)} with{'out' * (offsets is None)} offsets, in mode "
            f"{mode!r}: give bags by places, (B, L), filled up with padding_idx; no offsets; and per_sample_weights "
            "like the input, for mode 'sum' alone."
        )
    refuse_options(weight, max_norm, scale_grad_by_freq, sparse)
    if mode == "max":
        return NotImplemented
    input = input.long()  # the kernel has one type for all numbers
    inside = None if padding_idx is None else input != padding_idx
    rows = F.embedding(input, weight, padding_idx)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(2)
    total = (rows if inside is None else rows.masked_fill(~inside.unsqueeze(2), 0)).sum(1)
    if mode == "sum":
        return total
    return total / (max(input.shape[1], 1) if inside is None else inside.sum(1, keepdim=True).clamp_min(1))


def refuse_options(weight: Any, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    """Refuse options of an embedding that cannot be clipped, by name."""
    if isinstance(weight, PerExample) and (max_norm or scale_grad_by_freq or sparse):
        raise UserError(
            f"{weight.origin.label} goes into an embedding with max_norm (which rewrites rows in the forward pass), "
            "scale_grad_by_freq (which mixes examples) or sparse gradients (which carry no noise): do without."
        )


def late(
    weight: PerExample, bias: Tensor | None, like: Tensor, inputs: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A weight's and a bias's values, and zeros (B, T, p) with the gradients of T products x Wᵀ + b.

    Args:
        weight: W (p, d).
        bias: (p,), or None.
        like: (B, T, ...), which holds the examples as x does.
        inputs: gets x, (B, T, d), before the backward pass.

    Raises:
        UserError: the weight is computed.
    """
    if not weight.is_matrix or weight.transposed:
        raise UserError(
            f"{weight.origin.label} becomes a weight of a recurrent layer by a computation (weight_norm, say): take it "
            "off, or freeze it."
        )
    paired = bias if _pairs(weight, bias) else None
    values, own, zeros = weight.origin.late(weight, paired, like, inputs)
    return values, bias if paired is None else own, zeros


def _product(x: Tensor, weight: Any, bias: Tensor | None = None, batch_axes: int | None = None) -> Any:
    """x Wᵀ + b by the rule of linear layers, or `NotImplemented`.

    Args:
        x: (..., d).
        weight: W (p, d).
        bias: (p,), which pairs with it.
        batch_axes: how many of x's axes may hold the batch, by default all but the last.
    """
    if not isinstance(weight, PerExample) or not weight.is_matrix or x.dim() < 2 or not x.numel():
        return NotImplemented
    layout = None
    if not isinstance(x, PerExample):
        layout = weight.origin.find(x, meets=False)
        axes = x.dim() - 1 if batch_axes is None else batch_axes
        if not layout.shared and (layout.axis >= axes or (layout.axis and layout.each > 1)):
            return NotImplemented
    return weight.origin.linear(weight, x, bias, layout)


def _pairs(weight: Any, bias: Any) -> bool:
    """Whether both are parameters, or rows of them, that one layer of a group can have."""
    if not (isinstance(weight, PerExample) and isinstance(bias, PerExample) and weight.source and bias.source):
        return False
    return bias.like.dim() == 1 and len(bias.like) == len(weight.like) and bool(weight.origin.pairs(bias))
