"""Checks a model and its engine on a few real examples before training: the engine must equal a slow loop over them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.patching import FrozenStatistics
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.clipping.runs import Runs, moved_losses
from groupwise.clipping.shared_draws import check_draws
from groupwise.clipping.unchanged import moved_parameters, same_values, unchanged
from groupwise.errors import UserError

SMALL = 1e-3
"""Of a group's whole sum: a parameter's share below this has the rounding of the others."""
NEGLIGIBLE = 1e-5
"""Of an example's whole gradient: a group's share below this is what rounding leaves of nothing (a bias in front of a
normalisation, say), and is not compared."""
CONSTANT = (
    "if batches are padded, mask the padding; if the examples are constant (all zeros, say), normalisations magnify "
    "rounding, so give others; else please report this for built-in layers"
)
NOT_ALONE = (
    "Random numbers are drawn by Python or numpy, or by an unusual operation of torch, and cannot be repeated for an "
    "example alone. So examples are compared within their batch only: make sure that padding is masked, and that no "
    "loss depends on the size of its batch; or draw by torch.rand or torch.randn."
)
MANY = 64
"""Rows of the larger batch that is compared, at most."""


def verify(
    engine: ClippingEngine,
    losses_of: Callable[[Sequence[int]], Tensor],
    examples: Sequence[int],
    tolerance: float = 0.05,
    loss_tolerance: float = 1e-3,
    rows: int = 5,
    most: int = 64,
) -> float:
    """Refuse a model whose examples influence each other, share randomness, or are clipped otherwise than by a loop.

    Modules run in the mode (train or eval) that they are in, which should be that of the training. First, every example
    must draw its own random numbers, and no buffer may change. An engine without a plan is traced. Then, with dropout
    masks at their expectation, losses, norms and clipped sums of two batches are compared with a loop over
    single examples: one as large as a microbatch, at the engine's thresholds, and one of a few, at thresholds that clip
    about half of it. Gradients, thresholds, counts, buffers and generators are put back.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,), through the attached model.
        examples: indices, the longest first where lengths differ. Five of different kinds see the most; one alone
            cannot show what examples do to each other.
        tolerance: largest error allowed in an example's norm in a group (relative), and in a parameter's clipped sum,
            relative to its group's clipped norms. It is wide because float32 itself is. What this check is for (a use
            left out of a norm, a wrong axis) is off by far more.
        loss_tolerance: largest relative change allowed in a loss when the rest of its batch changes.
        rows: how many of the examples are taken.
        most: how many examples a microbatch may have; up to 64 run at once, copies of those that are taken.

    Returns:
        The largest relative error of a clipped sum.

    Raises:
        UserError: naming the layer, buffer, parameter or group that is not what it should be.
    """
    some = list(dict.fromkeys(examples))[: max(1, rows)]
    with unchanged(engine.model) as generators, moved_parameters(engine.model), _kept(engine):
        runs = Runs(engine.model, losses_of, generators)
        buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
        calms = check_draws(runs, some)
        if not calms:
            warnings.warn(NOT_ALONE, stacklevel=2)
        _check_buffers(engine, buffers)
        if len(some) > 1 and not engine.plan.calls:
            engine.trace(losses_of, some)
        compare = _Comparison(engine, runs, calms, tolerance, loss_tolerance)
        many = min(most, MANY) if calms and len(some) > 1 else 1  # copies may draw other numbers
        worst, norms = compare.batch(some + Random(0).choices(some, k=max(0, many - len(some))))
        if not norms.isfinite().any():
            raise UserError(
                f"No example of the {len(some)} that are checked before training has a finite loss and gradient, and "
                "such examples are left out of training: look for NaN in the data, the weights or the loss."
            )
        fewer = max(1, len(some) - 2)
        engine.set_thresholds(_halving(norms[:, :fewer], engine.thresholds))
        return max(worst, compare.batch(some[:fewer][::-1])[0])


@contextmanager
def _kept(engine: ClippingEngine) -> Iterator[None]:
    """Afterwards gradients, thresholds and counts are what they were."""
    gradients = [(p, p.grad) for p in engine.model.parameters()]
    clip, count, norms = engine.thresholds, engine.count_thresholds, engine.squared_norms
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with engine.uncounted():
            yield
    finally:
        engine.set_thresholds(clip, count)
        engine.squared_norms = norms
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _check_buffers(engine: ClippingEngine, before: dict[str, Tensor]) -> None:
    now = dict(engine.model.named_buffers())
    for name, value in before.items():
        if name in now and not same_values(now[name], value):
            raise UserError(
                f"Buffer {name!r} changes in a forward pass of training, so it carries what it saw past all clipping "
                "and noise: put its module into eval mode for good, or use one without running state."
            )


def _halving(norms: Tensor, given: Tensor) -> Tensor:
    """Thresholds (K,) between the norms (K, n) of each group's longer and shorter half, well off both if it can be."""
    ordered = norms.sort(dim=1).values
    n = norms.shape[1]
    upper = ordered[:, n // 2]
    lower = ordered[:, n // 2 - 1] if n > 1 else upper / 2
    at = (lower * upper).sqrt().to(given)
    return torch.where(at.isfinite() & (at > 0), at, given)


@dataclass(frozen=True)
class _Comparison:
    """Of batches by the engine with a loop over their examples."""

    engine: ClippingEngine
    runs: Runs
    calms: bool
    """Whether random numbers can be put to their expectation. Otherwise an example does not meet alone what it meets in
    its batch, and the loop takes its gradient from there."""
    tolerance: float
    loss_tolerance: float

    def batch(self, examples: list[int]) -> tuple[float, Tensor]:
        """The largest error of a clipped sum, and the norms (K, n) of the loop, of each example once.

        Raises:
            UserError: naming the example, parameter or group that is not what it should be.
        """
        engine, runs = self.engine, self.runs
        some = list(dict.fromkeys(examples))
        for parameter in engine.model.parameters():
            parameter.grad = None
        alone: dict[int, Tensor] = {}
        with runs.drawing(calm=True):  # backward passes draw, too, where layers are checkpointed

            def loss_of(example: int) -> Tensor:
                with FrozenStatistics():
                    loss = runs.losses([example])[0] if self.calms else runs.losses(examples)[examples.index(example)]
                alone[example] = loss.detach()
                return loss

            losses = engine.losses(runs.losses, examples)
            engine.backward(losses)
            sums = {name: parameter.grad for name, parameter in engine.model.named_parameters()}
            thresholds, rule = engine.thresholds.cpu(), engine.groups[0].clip_rule
            times = [examples.count(i) for i in some]
            truth = clipped_sums(engine.model, loss_of, some, engine.partition, thresholds, rule, times)
        self._check_losses(examples, losses.detach(), torch.stack([alone[i] for i in examples]))
        norms = truth.norms[:, [some.index(i) for i in examples]].double()
        off = self.tolerance * norms + 1e-12 + NEGLIGIBLE * norms.nan_to_num(0, 0, 0).norm(dim=0)
        self._check_norms(examples, engine.per_example_norms.cpu().double(), norms, off)
        return self._check_sums(sums, truth, norms, off), truth.norms

    def _check_losses(self, examples: list[int], found: Tensor, alone: Tensor) -> None:
        for row in moved_losses(found, alone, self.loss_tolerance):
            i, n = examples[row], len(examples)
            seen = self.runs.first_difference([i], [i] * n, [0], calm=True)
            raise UserError(
                f"Example {i} has loss {float(alone[row]):.6g} alone but {float(found[row]):.6g} among others: a "
                f"layer or the loss mixes the examples of a batch{seen}, so no example's influence is bounded: compute "
                "each loss from its own example alone; mask padding, and divide by the example's own length."
            )

    def _check_norms(self, examples: list[int], found: Tensor, norms: Tensor, off: Tensor) -> None:
        """Of the rows of the batch, (K, n); two that are not finite are alike."""
        apart = ((found - norms).abs() > off) | (found.isfinite() != norms.isfinite())
        for k, row in apart.nonzero().tolist():
            group = self.engine.groups[k]
            layers = ", ".join(repr(member.name) for member in group.members[:3])
            layers += ", ..." if group.members[3:] else ""
            raise UserError(
                f"The gradient norm of example {examples[row]} in group {group.name!r} (of {layers}) is "
                f"{float(found[k, row]):.6g}, but {float(norms[k, row]):.6g} by a loop over single examples: a layer "
                f"there does not take the batch as first axis, in the order of the losses, or its rule is wrong; "
                f"{CONSTANT}."
            )

    def _check_sums(self, sums: dict[str, Tensor | None], truth: Reference, norms: Tensor, off: Tensor) -> float:
        """Errors are relative to Σ_i factor_i·‖g^(i)‖ over the parameter itself: a sum that cancels is no scale, and in
        a large group a small layer's own error would not show. What rounding leaves of nothing is no error."""
        names = {id(p): name for name, p in self.engine.model.named_parameters()}
        worst = 0.0
        for k, group in enumerate(self.engine.groups):
            finite = norms[k].isfinite()
            factors = self.engine.factors(norms[k].to(group.threshold).square(), k).to(norms)
            whole = float((factors * off[k])[finite].sum().clamp_min(1e-12)) / self.tolerance
            nothing = NEGLIGIBLE * float(factors[finite] @ norms.nan_to_num(0, 0, 0).norm(dim=0)[finite])
            for parameter in group.parameters:
                name = names[id(parameter)]
                scale = truth.sizes[name] + SMALL * whole + nothing / self.tolerance
                error = float((sums[name] - truth.sums[name]).norm()) / scale  # type: ignore[operator]
                worst = max(worst, error)
                if not error <= self.tolerance:
                    raise UserError(
                        f"The clipped sum of parameter {name!r} is off by {error:.1e} (relative) from a loop over "
                        f"single examples: {CONSTANT}."
                    )
        return worst
