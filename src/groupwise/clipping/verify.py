"""A check before training: on a few real examples the engine equals a loop over single examples."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.reference import clipped_sums
from groupwise.errors import UserError


def verify(
    engine: ClippingEngine,
    losses_of: Callable[[Sequence[int]], Tensor],
    examples: Sequence[int],
    tolerance: float = 1e-3,
) -> float:
    """Compare one backward pass of the engine with the reference, and the losses alone with the losses together.

    The model runs in eval mode (dropout off); gradients, counts and modes are put back as they were.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,), through the attached model.
        examples: two or more indices.
        tolerance: largest relative error allowed, for losses and for the clipped sum of each parameter.

    Returns:
        The largest relative error of a clipped sum.

    Raises:
        UserError: examples influence each other, or a clipped sum is not what it should be.
    """
    model = engine.model
    training = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters()]
    counted = [(group.threshold, group.threshold.grad, group.nonfinite.clone(), group) for group in engine.groups]
    seen = engine.examples
    model.eval()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        _check_independence(engine, losses_of, examples, tolerance)
        with engine.bypassed():
            thresholds = engine.thresholds.cpu()
            rule = engine.groups[0].clip_rule
            truth = clipped_sums(model, lambda i: losses_of([i])[0], examples, engine.partition, thresholds, rule)
        engine.backward(losses_of(examples))
        return _check_sums(engine, truth.sums, tolerance)
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for threshold, count, nonfinite, group in counted:
            threshold.grad = count
            group.nonfinite.copy_(nonfinite)
        engine.examples = seen


def _check_independence(
    engine: ClippingEngine, losses_of: Callable[[Sequence[int]], Tensor], examples: Sequence[int], tolerance: float
) -> None:
    with engine.bypassed(), torch.no_grad():
        together = losses_of(examples)
        if together.shape != (len(examples),):
            raise UserError(
                f"The loss must be one value per example: {len(examples)} examples gave shape {tuple(together.shape)}."
            )
        alone = torch.cat([losses_of([i]) for i in examples])
    for i, a, b in zip(examples, together.tolist(), alone.tolist(), strict=True):
        if abs(a - b) > tolerance * max(1.0, abs(b)):
            raise UserError(
                f"Example {i} has loss {b:.6g} alone but {a:.6g} among others: a layer or the loss mixes the examples of a "
                "batch, so no example's influence is bounded."
            )


def _check_sums(engine: ClippingEngine, truth: dict[str, Tensor], tolerance: float) -> float:
    worst = 0.0
    for name, parameter in engine.model.named_parameters():
        if name not in truth:
            continue
        expected = truth[name]
        error = float((parameter.grad - expected).norm() / expected.norm().clamp_min(1e-6))  # type: ignore[operator]
        worst = max(worst, error)
        if error > tolerance:
            raise UserError(
                f"The clipped sum of parameter {name!r} is off by {error:.1e} (relative); please report this."
            )
    return worst
