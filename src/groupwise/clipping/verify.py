"""A check before training: on a few real examples the engine equals a loop over single examples."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.errors import UserError


def verify(
    engine: ClippingEngine,
    losses_of: Callable[[Sequence[int]], Tensor],
    examples: Sequence[int],
    tolerance: float = 0.05,
    loss_tolerance: float = 1e-3,
) -> float:
    """Compare one backward pass of the engine with the reference, and the losses alone with the losses together.

    The model runs in eval mode (dropout off); gradients, counts and modes are put back as they were.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,), through the attached model.
        examples: two or more indices.
        tolerance: largest error allowed in a parameter's clipped sum, relative to its group's clipped norms. It is wide
            because float32 itself is: a bias in front of a normalisation has a gradient that is all cancellation. What
            this check is for (a use left out of a norm, a wrong axis) is off by far more.
        loss_tolerance: largest relative change allowed in a loss when other examples join it.

    Returns:
        The largest relative error of a clipped sum.

    Raises:
        UserError: examples influence each other, or a clipped sum is not what it should be.
    """
    model = engine.model
    training = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters()]
    model.eval()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        _check_independence(engine, losses_of, examples, loss_tolerance)
        with engine.bypassed():
            thresholds = engine.thresholds.cpu()
            rule = engine.groups[0].clip_rule
            truth = clipped_sums(model, lambda i: losses_of([i])[0], examples, engine.partition, thresholds, rule)
        with engine.uncounted():
            engine.backward(losses_of(examples))
        return _check_sums(engine, truth, tolerance)
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


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
                f"Example {i} has loss {b:.6g} alone but {a:.6g} among others: a layer or the loss mixes the examples "
                "of a batch, so no example's influence is bounded."
            )


def _check_sums(engine: ClippingEngine, truth: Reference, tolerance: float) -> float:
    """Errors are relative to Σ_i min(‖g_k^(i)‖, C_k): a sum that cancels is no scale."""
    scales = truth.norms.clamp_max(engine.thresholds.cpu().view(-1, 1)).sum(1).clamp_min(1e-12)
    names = {id(p): name for name, p in engine.model.named_parameters()}
    worst = 0.0
    for group, scale in zip(engine.groups, scales.tolist(), strict=True):
        for parameter in group.parameters:
            name = names[id(parameter)]
            error = float((parameter.grad - truth.sums[name]).norm()) / scale  # type: ignore[operator]
            worst = max(worst, error)
            if error > tolerance:
                raise UserError(
                    f"The clipped sum of parameter {name!r} is off by {error:.1e} (relative); please report this."
                )
    return worst
