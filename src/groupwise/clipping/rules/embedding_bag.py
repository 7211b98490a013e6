"""`nn.EmbeddingBag` in plain operations: bags become rows of one length, and what is not in a bag is masked out.

With offsets the first axis of the input is no batch: an example is a bag, and there are as many as offsets (less the
last, where the module is told to include it).
"""

import torch
from torch import Tensor, nn

from groupwise.clipping.rules.weights import Forward, Weights
from groupwise.errors import UserError


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
        UserError: shapes that do not fit, factors for another mode, or what `refuse_embedding_bag` names.
    """
    reason = refuse_embedding_bag(module)
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
    factors, fill = per_sample_weights, module.padding_idx or 0
    if offsets is None:
        inside = torch.ones_like(input, dtype=torch.bool)
    else:
        places, inside = _places(input, offsets, module.include_last_offset)
        input = torch.where(inside, nn.functional.pad(input, (0, 1), value=fill)[places], fill)
        factors = None if factors is None else nn.functional.pad(factors, (0, 1))[places]
    if module.padding_idx is not None:
        inside = inside & (input != module.padding_idx)
    rows = weights.embedding(input, "weight", module.padding_idx)
    present = inside.unsqueeze(2)
    if module.mode == "max":
        most = rows.masked_fill(~present, -torch.inf).max(1).values
        return torch.where(inside.any(1, keepdim=True), most, 0.0)
    total = (rows if factors is None else rows * factors.unsqueeze(2)).masked_fill(~present, 0).sum(1)
    return total / inside.sum(1, keepdim=True).clamp_min(1) if module.mode == "mean" else total


def refuse_embedding_bag(module: nn.EmbeddingBag) -> str | None:
    """Why this very layer cannot be clipped, or None."""
    if module.max_norm is not None:
        return "max_norm rewrites rows of the weight during forward, outside the private mechanism"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the whole batch and so mixes examples"
    if module.sparse:
        return "sparse gradients cannot carry noise, which is dense: build it with sparse=False"
    return None


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
