"""Says `nn.MultiheadAttention` in plain operations: self, cross and mixed attention, with every mask that torch takes.

The product with the packed input weight is one linear map where query, key and value are one tensor, else one for each
run of rows that reads the same tensor. Batch is the first axis inside, whatever `batch_first` says.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.rules.weights import Forward, Weights, refuse_unbatched
from groupwise.errors import UserError


def attention(
    weights: Weights,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `nn.MultiheadAttention` computes.

    Args:
        weights: the uses of the module's parameters.
        module: the layer.
        query: (B, L, E), or (L, B, E) without `batch_first`; key (B, S, kdim) and value (B, S, vdim) alike.
        key: see query.
        value: see query.
        key_padding_mask: (B, S), true or -inf where a key is padding.
        need_weights: also return the weights, and do not use the fused kernel.
        attn_mask: (L, S) or (B · heads, L, S), true where attention is forbidden, or numbers to add.
        average_attn_weights: return the mean of the weights over the heads.
        is_causal: attn_mask is the causal one; the fused kernel need not read it.

    Returns:
        Outputs like the query, and the weights (B, L, S) or (B, heads, L, S), or None.

    Raises:
        UserError: no batch, batches of different sizes, `is_causal` without a mask, or what `refuse_attention` names.
    """
    reason = refuse_attention(module)
    if reason:
        raise UserError(f"MultiheadAttention cannot be clipped: {reason}.")
    for x in (query, key, value):
        refuse_unbatched(module, x, 3)
    axis = 0 if module.batch_first else 1
    if not query.shape[axis] == key.shape[axis] == value.shape[axis]:
        raise UserError(
            f"MultiheadAttention got batches of {query.shape[axis]}, {key.shape[axis]} and {value.shape[axis]} for "
            "query, key and value: each must have one row for each example."
        )
    if is_causal and attn_mask is None:
        raise UserError("MultiheadAttention got is_causal=True without attn_mask: give the causal mask as well.")
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # the kernel knows it
    else:
        is_causal = False
    q, k, v = (
        part.unflatten(2, (module.num_heads, -1)).transpose(1, 2)
        for part in _project(weights, module, query, key, value)
    )
    k, v = _extended(weights, module, k, v)
    mask = _mask(module, attn_mask, key_padding_mask, q, k)
    rate, shares = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = q * math.sqrt(1 / q.shape[3]) @ k.mT
        shares = torch.softmax(scores if mask is None else scores + mask, 3)
        shares = F.dropout(shares, rate) if rate > 0 else shares
        mixed = shares.to(v.dtype) @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal)
    bias = None if module.out_proj.bias is None else "out_proj.bias"
    y = weights.linear(mixed.transpose(1, 2).flatten(2), "out_proj.weight", bias)
    return (y if module.batch_first else y.transpose(0, 1)), shares


def refuse_attention(module: nn.MultiheadAttention) -> str | None:
    """Why this very layer cannot be clipped, or None."""
    if type(module.out_proj).forward is not nn.Linear.forward or not isinstance(module.out_proj, nn.Linear):
        return f"its out_proj is a {type(module.out_proj).__name__}, not the Linear that it was built with"
    return None


ATTENTION: dict[type[nn.Module], Forward] = {nn.MultiheadAttention: attention}


def _project(weights: Weights, module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values (B, ..., E), with one linear map for those next to each other that are one tensor."""
    size, bias = module.embed_dim, None if module.in_proj_bias is None else "in_proj_bias"
    places = [slice(i * size, (i + 1) * size) for i in range(3)]
    firsts = inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]
    if module.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [
            weights.linear(x, name, bias, bias_rows=rows) for x, name, rows in zip(firsts, names, places, strict=True)
        ]
    projected: list[Tensor] = []
    while (start := len(projected)) < 3:
        end = start + 1
        while end < 3 and inputs[end] is inputs[start]:
            end += 1
        rows = None if end - start == 3 else slice(start * size, end * size)
        projected += weights.linear(firsts[start], "in_proj_weight", bias, rows).split(size, 2)
    return projected


def _extended(weights: Weights, module: nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, heads, S, E / heads) with the frozen ones and zeros that the module appends."""
    if module.bias_k is not None:
        k, v = (
            torch.cat([x, _as_heads(weights.each(name, len(x)), x)], 2) for x, name in ((k, "bias_k"), (v, "bias_v"))
        )
    return (F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))) if module.add_zero_attn else (k, v)


def _as_heads(rows: Tensor, like: Tensor) -> Tensor:
    """(B, 1, 1, E) -> (B, heads, 1, E / heads)."""
    return rows.to(like.dtype).view(len(like), like.shape[1], 1, -1)


def _mask(
    module: nn.MultiheadAttention, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Both masks as numbers to add to scores (B, heads, L, S), or None; what the module appended is never masked."""
    appended = (module.bias_k is not None) + module.add_zero_attn
    expected = (len(q), k.shape[2] - appended)
    if padding is not None and padding.shape != expected:
        raise UserError(
            f"MultiheadAttention got a key_padding_mask of {tuple(padding.shape)}; {expected} was expected."
        )
    if padding is not None:
        padding = _numbers(padding, q.dtype, appended)[:, None, None]
    if attn_mask is None:
        return padding
    last = (q.shape[2], expected[1])
    if attn_mask.shape not in (last, (len(q) * module.num_heads, *last)):
        raise UserError(
            f"MultiheadAttention got an attn_mask of {tuple(attn_mask.shape)}; {last}, or one for each example "
            "and head, was expected."
        )
    mask = _numbers(attn_mask, q.dtype, appended)
    mask = mask if mask.dim() == 2 else mask.unflatten(0, (len(q), -1))
    return mask if padding is None else mask + padding


def _numbers(mask: Tensor, dtype: torch.dtype, appended: int) -> Tensor:
    """-inf where a mask is true; nothing in the last `appended` columns, which are added here."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return F.pad(mask.to(dtype), (0, appended))
