"""Says `F.multi_head_attention_forward` in plain operations, which is what `nn.MultiheadAttention` computes.

The product with the packed input weight is one linear map where query, key and value are one tensor, else one for each
run of rows that reads the same tensor. Batch is the first axis inside.
"""

import math
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.per_example import in_place_of, refuse_unbatched


@in_place_of(F.multi_head_attention_forward)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the function of torch computes, from the same arguments.

    Args:
        query: (L, B, E); key (S, B, kdim) and value (S, B, vdim) alike.
        key_padding_mask: (B, S), true or -inf where a key is padding.
        need_weights: also return the weights, and do not use the fused kernel.
        attn_mask: (L, S) or (B · heads, L, S), true where attention is forbidden, or numbers to add.
        average_attn_weights: return the mean of the weights over the heads.
        is_causal: attn_mask is the causal one; the fused kernel need not read it.

    Returns:
        Outputs (L, B, E), and the weights (B, L, S) or (B, heads, L, S), or None.

    Raises:
        UserError: an input without a batch.
    """
    for x in (query, key, value):
        refuse_unbatched("MultiheadAttention", x, 3)
    inputs, size = (query, key, value), query.shape[2]
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        projected = [
            F.linear(x.transpose(0, 1), weight, _rows(in_proj_bias, i * size, (i + 1) * size))
            for i, (x, weight) in enumerate(zip(inputs, weights, strict=True))
        ]
    else:
        projected = _project(inputs, in_proj_weight, in_proj_bias)
    q, k, v = projected
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, bias.expand(len(x), 1, -1).to(x.dtype)], 1) for x, bias in ((k, bias_k), (v, bias_v)))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = _mask(None if is_causal else attn_mask, key_padding_mask, q, k)  # the kernel knows the causal one
    rate, shares = dropout_p if training else 0.0, None
    if need_weights:
        scores = q * math.sqrt(1 / q.shape[3]) @ k.mT
        shares = torch.softmax(scores if mask is None else scores + mask, 3)
        shares = F.dropout(shares, rate) if rate > 0 else shares
        mixed = shares.to(v.dtype) @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal)
    y = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return y.transpose(0, 1), shares


def _project(inputs: tuple[Tensor, ...], weight: Any, bias: Tensor | None) -> list[Tensor]:
    """Queries, keys and values (B, ..., E), with one linear map for those next to each other that are one tensor."""
    size, projected = inputs[0].shape[2], list[Tensor]()
    for _, same in groupby(inputs, key=id):
        start, [x, *more] = len(projected) * size, same
        stop = start + (1 + len(more)) * size
        rows = weight if len(more) == 2 else weight[start:stop]
        projected += F.linear(x.transpose(0, 1), rows, _rows(bias, start, stop)).split(size, 2)
    return projected


def _rows(bias: Tensor | None, start: int, stop: int) -> Tensor | None:
    return bias if bias is None or stop - start == len(bias) else bias[start:stop]


def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as numbers to add to scores (B, heads, L, S), or None; keys that were appended are never masked."""
    if padding is not None:
        padding = _numbers(padding, q.dtype, k.shape[2])[:, None, None]
    if attn_mask is None:
        return padding
    mask = _numbers(attn_mask, q.dtype, k.shape[2])
    mask = mask if mask.dim() == 2 else mask.unflatten(0, (len(q), -1))
    return mask if padding is None else mask + padding


def _numbers(mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """-inf where a mask is true; nothing for the last keys, which are appended here."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return F.pad(mask.to(dtype), (0, keys - mask.shape[-1]))
