"""Computes one loss for each example where the model of transformers would return their mean."""

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
GIVE_LOSSES = "give PrivateTrainer(losses=...), a function of (model, inputs) that returns one loss for each example"


def cross_entropies(model: nn.Module, inputs: dict[str, Any], *, shifted: bool = False) -> Tensor:
    """Cross-entropy of logits (b, C) with labels (b,), or its mean over tokens, of (b, T, V) with (b, T); returns (b,).

    Args:
        model, inputs: of b examples; the labels are not given to the model, which would average over the batch.
        shifted: the logits at position t are of token t + 1, as in a causal model.

    Raises:
        UserError: labels of another kind or shape, or that name no class.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise UserError(f"The inputs have no whole numbers as 'labels', so no loss is known for them: {GIVE_LOSSES}.")
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    logits = at_least_float32(outputs["logits"])
    if labels.ndim not in (1, 2) or logits.ndim != labels.ndim + 1 or labels.shape != logits.shape[:-1]:
        raise UserError(
            f"The logits have shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}, which is neither "
            f"classification nor a language model: {GIVE_LOSSES}."
        )
    classes = logits.shape[-1]
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise UserError(
            f"An example has the label {int(wrong[0])}, and the model has {classes} classes or tokens, counted from 0: "
            f"make a model of as many as there are ({IGNORED} predicts nothing)."
        )
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return token_losses(logits, labels).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


CANDIDATES: tuple[LossesOf, ...] = (cross_entropies, partial(cross_entropies, shifted=True))


def find_losses(model: nn.Module, examples: Sequence[dict[str, Any]], tolerance: float) -> LossesOf:
    """The cross-entropies, shifted or not, that are what the model itself computes from labels.

    Args:
        model: that returns a ``loss`` when it is given labels. examples: inputs of one example each.
        tolerance: how far the two may be apart, relative to 1 at least.

    Raises:
        UserError: neither is, or the model computes no loss.
    """
    with eval_mode(model), torch.no_grad():
        found = [(_distance(model, losses_of, examples), losses_of) for losses_of in CANDIDATES]
    distance, losses_of = min(found, key=lambda pair: pair[0])
    if not distance <= tolerance:
        raise UserError(
            f"The model's own loss is not the cross-entropy of its labels (they differ by {distance:.2g}), so it would "
            f"train for something else: {GIVE_LOSSES}."
        )
    return losses_of


def _distance(model: nn.Module, losses_of: LossesOf, examples: Sequence[dict[str, Any]]) -> float:
    """The largest difference between the model's loss and ours; an example without a target has none."""
    largest = math.inf
    for inputs in examples:
        ours = float(losses_of(model, inputs).mean())
        own = model(**inputs)
        loss = own.get("loss")
        if loss is not None and math.isfinite(float(loss)):
            difference = abs(float(loss) - ours) / max(1.0, abs(ours))
            largest = difference if largest == math.inf else max(largest, difference)
    return largest
