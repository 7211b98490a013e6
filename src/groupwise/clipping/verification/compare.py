"""Proves, on a few real examples before training, that examples keep apart and that the engine equals a slow loop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice

import torch
from torch import Tensor

from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.partition import batch_norms
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.clipping.trace import moved_losses
from groupwise.clipping.unchanged import kept_buffers, moved_parameters
from groupwise.clipping.verification.independence import (
    check_apart,
    check_draws,
    check_many,
    check_trace,
    first_seen,
    moved_norms,
    slack,
)
from groupwise.clipping.verification.runs import Losses, Runs
from groupwise.errors import UserError

SMALL = 1e-3
"""Of a group's whole sum: a parameter's share below this has the rounding of the others."""
MANY = 64
"""Examples among which those that are compared run once."""


def verify(
    engine: ClippingEngine,
    losses_of: Losses,
    examples: Sequence[int],
    tolerance: float = 0.05,
    loss_tolerance: float = 1e-3,
    rows: int = 5,
    most: int = 64,
) -> float:
    """Refuse a model whose examples influence each other, share randomness, or are clipped otherwise than by a loop.

    The model runs in training mode (but BatchNorm, and submodules in eval mode), a handful of times on `rows` examples
    at most. First, every example must draw its own random numbers, and no buffer may change. An engine without a plan
    is traced. Then some examples of a batch are replaced, and the others must keep their losses and gradient norms.
    Then, with dropout masks at their expectation, norms, counts and clipped sums of two batches of different sizes are
    compared with a loop over single examples: one at the engine's thresholds, one at thresholds that clip about half of
    it. Gradients, thresholds, counts, modes, buffers and generators are put back.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,), through the attached model.
        examples: indices, the longest first where lengths differ. Five of different kinds see the most; one alone
            cannot show what examples do to each other.
        tolerance: largest error allowed in an example's norm in a group (relative), and in a parameter's clipped sum,
            relative to its group's clipped norms. It is wide because float32 itself is. What this check is for (a use
            left out of a norm, a wrong axis) is off by far more.
        loss_tolerance: largest relative change allowed in a loss when the rest of its batch changes.
        rows: how many examples fit into memory at once with gradients.
        most: how many examples a microbatch may have; as many run once, up to 64.

    Returns:
        The largest relative error of a clipped sum.

    Raises:
        UserError: naming the layer, buffer, parameter or group that is not what it should be.
    """
    some = list(dict.fromkeys(examples))[: max(1, rows)]
    batch = list(islice(cycle(some), max(2, rows)))
    runs = Runs(engine, losses_of)
    model = engine.model
    with runs.generators.kept(), moved_parameters(model), kept_buffers(model) as buffers, _kept(engine):
        check_draws(runs, batch, buffers)
        check_trace(runs, batch, loss_tolerance)
        check_apart(runs, batch if len(some) > 1 else some, tolerance, loss_tolerance)
        worst, norms = _compare(runs, some, tolerance, loss_tolerance)
        fewer = max(1, len(some) - 2)
        engine.set_thresholds(_halving(norms[:, :fewer], engine.thresholds))
        worst = max(worst, _compare(runs, some[:fewer][::-1], tolerance, loss_tolerance)[0])
        check_many(runs, some, min(most, MANY), loss_tolerance)
        return worst


@contextmanager
def _kept(engine: ClippingEngine) -> Iterator[None]:
    """The model trains, but for BatchNorm; afterwards modes, gradients, thresholds and counts are what they were."""
    model = engine.model
    training = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters()]
    clip, count, norms = engine.thresholds, engine.count_thresholds, engine.squared_norms
    if not model.training:
        model.train()
        for _, norm in batch_norms(model):  # whose training is refused
            norm.eval()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with engine.uncounted(), torch.enable_grad():
            yield
    finally:
        engine.set_thresholds(clip, count)
        engine.squared_norms = norms
        for module, mode in training.items():
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _compare(runs: Runs, examples: Sequence[int], tolerance: float, loss_tolerance: float) -> tuple[float, Tensor]:
    """One batch by the engine and by the loop: the largest error of a clipped sum, and the loop's norms (K, n)."""
    engine = runs.engine
    runs.clear()
    found = runs.clipped(examples, calm=True)
    losses: dict[int, Tensor] = {}

    def loss_of(example: int) -> Tensor:
        loss = runs.among(examples, example) if runs.uncalmed else runs.alone(example)
        losses[example] = loss.detach()
        return loss

    again = runs.calm() if found.draws else nullcontext()  # checkpointed layers draw once more in the backward pass
    with again:
        thresholds, rule = engine.thresholds.cpu(), engine.groups[0].clip_rule
        truth = clipped_sums(engine.model, loss_of, examples, engine.partition, thresholds, rule)
    alone = torch.stack([losses[i] for i in examples])
    for row in moved_losses(found.losses, alone, loss_tolerance).nonzero().flatten().tolist():
        i = examples[row]
        seen = first_seen([i], [i] * len(examples), [0], runs, calm=True)
        raise UserError(
            f"Example {i} has loss {float(alone[row]):.6g} alone but {float(found.losses[row]):.6g} among others: a "
            f"layer or the loss mixes the examples of a batch{seen}, so no example's influence is bounded: compute "
            "each loss from its own example alone."
        )
    _check_norms(engine, examples, found.norms, truth.norms, tolerance)
    _check_counts(engine, found.counts, truth.norms, tolerance)
    return _check_sums(engine, truth, tolerance), truth.norms


def _halving(norms: Tensor, given: Tensor) -> Tensor:
    """Thresholds (K,) between the norms (K, n) of each group's longer and shorter half, well off both if it can be."""
    ordered = norms.sort(dim=1).values
    n = norms.shape[1]
    upper = ordered[:, n // 2]
    lower = ordered[:, n // 2 - 1] if n > 1 else upper / 2
    at = (lower * upper).sqrt().to(given)
    return torch.where(at.isfinite() & (at > 0), at, given)


def _check_norms(
    engine: ClippingEngine, examples: Sequence[int], found: Tensor, truth: Tensor, tolerance: float
) -> None:
    for k, row in moved_norms(found, truth, tolerance).nonzero().tolist():
        group = engine.groups[k]
        layers = ", ".join(repr(member.name) for member in group.members[:3]) + (", ..." if group.members[3:] else "")
        raise UserError(
            f"The gradient norm of example {examples[row]} in group {group.name!r} (of {layers}) is "
            f"{float(found[k, row]):.6g}, but {float(truth[k, row]):.6g} by a loop over single examples: a layer there "
            "does not take the batch as first axis, in the order of the losses, or its rule is wrong (please report a "
            "built-in one)."
        )


def _check_counts(engine: ClippingEngine, found: Tensor, truth: Tensor, tolerance: float) -> None:
    at, off = engine.count_thresholds.cpu().view(-1, 1), slack(truth.double(), tolerance)
    least, most = (truth + off <= at).sum(1), (truth - off <= at).sum(1)
    for group, count, low, high in zip(engine.groups, found.tolist(), least.tolist(), most.tolist(), strict=True):
        if not low <= count <= high:
            raise UserError(
                f"Group {group.name!r} counts {count:.0f} examples within its threshold, but a loop over single "
                f"examples finds {low if low == high else f'{low} to {high}'}: please report this."
            )


def _check_sums(engine: ClippingEngine, truth: Reference, tolerance: float) -> float:
    """Errors are relative to Σ_i factor_i·‖g^(i)‖ over the parameter itself: a sum that cancels is no scale, and in a
    large group a small layer's own error would not show."""
    names = {id(p): name for name, p in engine.model.named_parameters()}
    off = slack(truth.norms, tolerance)
    worst = 0.0
    for k, group in enumerate(engine.groups):
        finite = truth.norms[k].isfinite()
        factors = group.factors(truth.norms[k].to(group.threshold).square()).to(truth.norms)
        whole = float((factors * off[k])[finite].sum().clamp_min(1e-12)) / tolerance
        for parameter in group.parameters:
            name = names[id(parameter)]
            scale = min(whole, truth.sizes[name] + SMALL * whole)
            error = float((parameter.grad - truth.sums[name]).norm()) / scale  # type: ignore[operator]
            worst = max(worst, error)
            if not error <= tolerance:
                raise UserError(
                    f"The clipped sum of parameter {name!r} is off by {error:.1e} (relative) from a loop over single "
                    "examples: please report this."
                )
    return worst
