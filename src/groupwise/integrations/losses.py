"""Computes one loss per example for models of transformers, which return the mean loss of a batch."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.tasks.samples import IGNORED
from groupwise.tasks.text_task import at_least_float32, token_losses
from groupwise.training.task import eval_mode

LossesOf = Callable[[nn.Module, dict[str, Any]], Tensor]
"""(model, inputs of b examples) -> their losses, (b,)."""
GIVE_LOSSES = "give PrivateTrainer(losses=...), a function of (model, inputs) that returns one loss per example"


def cross_entropies(
    model: nn.Module, inputs: dict[str, Any], *, shifted: bool = False, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropies of b examples, (b,); raises `UserError` for labels of another type or shape.

    Logits (b, C) go with labels (b,). For logits (b, T, V) and labels (b, T) it is the mean over an example's tokens.

    The labels are not given to the model, which would average over the batch. An encoder-decoder gets them, as it makes
    the decoder's inputs from them.

    Args:
        shifted: the logits at position t are those of token t + 1, as in a causal model.
        smoothing: label smoothing, the share of each target that is spread over all classes or tokens.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise UserError(f"The inputs have no integer 'labels', so their loss is unknown: {GIVE_LOSSES}.")
    if labels.ndim == 1 or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    logits = at_least_float32(model(**inputs)["logits"])
    if labels.ndim not in (1, 2) or logits.ndim != labels.ndim + 1 or labels.shape != logits.shape[:-1]:
        raise UserError(
            f"The logits have shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}, which is neither "
            f"classification nor a language model: {GIVE_LOSSES}."
        )
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return token_losses(logits, labels, smoothing).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def means_over_outputs(model: nn.Module, inputs: dict[str, Any], *, loss: Callable[..., Tensor] = F.mse_loss) -> Tensor:
    """The mean of ``loss`` over the C outputs of each example, (b,).

    Logits are (b, C); labels are (b, C) or, for C = 1, (b,). The squared error is for regression,
    `F.binary_cross_entropy_with_logits` for several labels at once.
    """
    labels = inputs["labels"]
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    logits = at_least_float32(outputs["logits"])
    if logits.shape[0] != labels.shape[0] or logits.numel() != labels.numel():
        raise UserError(
            f"The logits have shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: give as "
            f"many labels as outputs, or {GIVE_LOSSES}."
        )
    return loss(logits.flatten(1), labels.reshape(len(labels), -1).to(logits.dtype), reduction="none").mean(1)


def span_losses(model: nn.Module, inputs: dict[str, Any], *, masked: bool = True) -> Tensor:
    """Question answering: the mean cross-entropy of a span's first and last token, (b,).

    Logits at padding are left out. The models' own loss has them (``masked=False``), and so an example's loss depends
    on the length of other examples.
    """
    outputs = model(**{name: value for name, value in inputs.items() if not name.endswith("_positions")})
    logits = at_least_float32(torch.stack([outputs["start_logits"], outputs["end_logits"]], 1))
    whole = torch.ones_like(logits[:, 0])
    mask = inputs.get("attention_mask", whole) if masked else whole
    positions = torch.stack([inputs["start_positions"], inputs["end_positions"]], 1).flatten(1).clamp(0, mask.shape[1])
    inside = F.pad(mask, (0, 1)).gather(1, positions) > 0
    logits = logits.masked_fill(mask[:, None] == 0, torch.finfo(logits.dtype).min)
    return token_losses(logits, positions.where(inside, IGNORED)).mean(1)


def find_losses(
    model: nn.Module, read: Callable[..., Any], rows: Sequence[Any], tolerance: float, smoothing: float = 0.0
) -> LossesOf:
    """The per-example losses that agree with the model's own loss; raises `UserError` if none of those known does.

    Args:
        read, rows: ``read`` returns the inputs of some of ``rows``, which are read one at a time and, where their
            labels are classes or numbers, all at once.
        tolerance: of the difference, relative to a loss of at least 1.
        smoothing: label smoothing, which the model's own loss does not have.
    """
    candidates: tuple[LossesOf, ...] = (cross_entropies, partial(cross_entropies, shifted=True))
    examples = [read([row]) for row in rows]
    labels = examples[0].get("labels")
    numbers = isinstance(labels, Tensor) and labels.is_floating_point()
    if numbers or getattr(labels, "ndim", 2) == 1:
        examples.append(read(rows))  # class weights, say, have no effect on the loss of one example
    if "start_positions" in examples[0]:
        candidates = (span_losses, partial(span_losses, masked=False))
    elif numbers:
        candidates = (means_over_outputs, partial(means_over_outputs, loss=F.binary_cross_entropy_with_logits))
    if smoothing and cross_entropies not in candidates:
        raise UserError(f"label_smoothing_factor={smoothing} needs labels that are classes or tokens: leave it out.")
    with eval_mode(model), torch.no_grad():
        found = [(_distance(model, losses_of, examples), losses_of) for losses_of in candidates]
    distance, losses_of = min(found, key=lambda pair: pair[0])
    if not distance <= tolerance:
        what = f"neither cross-entropy nor squared error (the closest differs by {distance:.2g})"
        if distance == math.inf:
            what = "missing or NaN for all examples that were read, as it is if all labels are -100"
        raise UserError(f"The model's own loss is {what}, so its per-example losses are unknown: {GIVE_LOSSES}.")
    if span_losses in candidates:
        return span_losses
    return partial(losses_of, smoothing=smoothing) if smoothing else losses_of  # type: ignore[call-arg]


def _distance(model: nn.Module, losses_of: LossesOf, examples: Sequence[dict[str, Any]]) -> float:
    """The largest difference between the model's loss and ours, over the inputs for which the model has a loss."""
    found = []
    for inputs in examples:
        ours, own = losses_of(model, inputs), model(**inputs).get("loss")
        if losses_of is cross_entropies and inputs["labels"].ndim == 1:
            ours = ours[inputs["labels"] != IGNORED]
        if own is not None and math.isfinite(own):
            found.append(float(((own - ours.mean()).abs() / ours.mean().abs().clamp(min=1)).nan_to_num(math.inf)))
    return max(found, default=math.inf)
