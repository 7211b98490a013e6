"""Checks the engine on a few real examples before training, against a loop over single examples."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from groupwise.clipping.checks import LossesOf
from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.patching import FrozenStatistics
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.clipping.runs import Runs, moved_losses
from groupwise.clipping.shared_draws import check_draws
from groupwise.clipping.unchanged import moved_parameters, same_values, unchanged
from groupwise.errors import UserError

SMALL = 1e-3
"""Relative to a group's whole sum: a parameter's share below this is dominated by the rounding of the others."""
NEGLIGIBLE = 1e-5
"""Relative to an example's whole gradient: a group's share below this is taken for rounding of an exact zero (a bias
before a normalisation, say), and is not compared."""
ABOVE_ZERO = 0.01
"""Relative to the group's largest norm: a norm may be larger than that of the loop by so much."""
CONSTANT = (
    "if batches are padded, mask the padding; if the examples are constant (all zeros, say), normalisations magnify "
    "rounding, so give others; else please report this for built-in layers"
)
NOT_ALONE = (
    "Random numbers are drawn by Python or numpy, or by an unusual operation of torch, or every loss is 0 or NaN at "
    "their expectation. So they cannot be repeated for an example alone, and examples are compared within their batch "
    "only: make sure that padding is masked, and that no loss depends on its batch (its size, or how many tokens are "
    "masked in it)."
)
MANY = 64
"""The most rows in the larger of the two batches that are compared."""
HEAVY = 1e4
"""The weight of one loss in the smaller batch, so that mixing in the backward pass changes the other gradients."""


def verify(
    engine: ClippingEngine,
    losses_of: LossesOf,
    examples: Sequence[int],
    tolerance: float = 0.05,
    loss_tolerance: float = 1e-3,
    rows: int = 5,
    most: int = 64,
) -> float:
    """Check that examples do not influence each other or share randomness, and are clipped as by a loop over them.

    Modules run in their present mode (train or eval), which should be that of the training. First, every example must
    draw its own random numbers, and no buffer may change. An engine without a plan is traced. Then losses, norms and
    clipped sums of two batches are compared with a loop over single examples, with dropout masks at their expectation:
    a batch as large as a microbatch, at the engine's thresholds, and a small one, at thresholds that clip about half of
    it. Gradients, thresholds, counts, buffers and generators are restored.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,), computed by the attached model.
        examples: indices, the longest first if lengths differ. Five different examples detect the most; a single one
            cannot show whether examples influence each other.
        tolerance: largest error allowed in an example's norm in a group (relative), and in a parameter's clipped sum
            (relative to its group's clipped norms). It allows for the rounding of float32. The mistakes that this check
            looks for (a call missing from a norm, a wrong axis) are far larger. Under autocast at least 0.3.
        loss_tolerance: largest relative change allowed in a loss when the rest of its batch changes. Under autocast at
            least 0.05.
        rows: how many of the examples are used.
        most: the size of a microbatch; the larger batch has as many rows, at most 64, by repeating the examples.

    Returns:
        The largest relative error of a clipped sum.

    Raises:
        UserError: naming the layer, buffer, parameter or group that fails.
    """
    some = list(dict.fromkeys(examples))[: max(1, rows)]
    with unchanged(engine.model) as generators, moved_parameters(engine.model), _kept(engine):
        runs = Runs(engine.model, losses_of, generators)
        buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
        repeatable = check_draws(runs, some)
        if not repeatable:
            warnings.warn(NOT_ALONE, stacklevel=2)
        _check_buffers(engine, buffers)  # and again below, after passes with other rows
        if len(some) > 1 and not engine.plan.calls:
            engine.trace(losses_of, some)
        if runs.autocasts:
            tolerance, loss_tolerance = max(tolerance, 0.3), max(loss_tolerance, 0.05)
        compare = _Comparison(engine, runs, repeatable, tolerance, loss_tolerance)
        many = min(most, MANY) if repeatable and len(some) > 1 else 1  # else copies would draw other numbers
        worst, norms = compare.batch(some + Random(0).choices(some, k=max(0, many - len(some))))
        if not (norms.isfinite() & (norms > 0)).any():
            raise UserError(
                f"None of the {len(some)} examples that are checked before training has a finite loss and a gradient "
                "other than 0, so nothing can be compared: look for NaN in the data, the weights or the loss, and for "
                "losses that are 0."
            )
        fewer = max(1, len(some) - 2)
        engine.set_thresholds(_halving(norms[:, :fewer], engine.thresholds))
        worst = max(worst, compare.batch(some[:fewer][::-1], heavy=some[0])[0])
        _check_buffers(engine, buffers)
        return worst


@contextmanager
def _kept(engine: ClippingEngine) -> Iterator[None]:
    """Restore gradients, thresholds and counts afterwards."""
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
                f"Buffer {name!r} changes in a forward pass, so it keeps data of the examples without clipping and "
                "noise: put its module into eval mode before make_private, or use one without running state."
            )


def _halving(norms: Tensor, given: Tensor) -> Tensor:
    """Thresholds (K,) that clip about half of the norms (K, n) of each group, between its two middle norms."""
    ordered = norms.sort(dim=1).values
    n = norms.shape[1]
    upper = ordered[:, n // 2]
    lower = ordered[:, n // 2 - 1] if n > 1 else upper / 2
    at = (lower * upper).sqrt().to(given)
    return torch.where(at.isfinite() & (at > 0), at, given)


@dataclass(frozen=True)
class _Comparison:
    """Compares the engine on a batch with a loop over its examples."""

    engine: ClippingEngine
    runs: Runs
    repeatable: bool
    """Whether random numbers can be replaced by their expectation. Otherwise an example would draw other numbers alone,
    so the loop takes its gradient from the whole batch."""
    tolerance: float
    loss_tolerance: float

    def batch(self, examples: list[int], heavy: int | None = None) -> tuple[float, Tensor]:
        """The largest error of a clipped sum, and the loop's norms (K, n), each example once.

        The loss of the example `heavy` is multiplied by `HEAVY`. Raises a `UserError` that names the example, parameter
        or group that differs.
        """
        engine, runs = self.engine, self.runs
        some = list(dict.fromkeys(examples))
        for parameter in engine.model.parameters():
            parameter.grad = None
        alone: dict[int, Tensor] = {}
        with runs.drawing(mean=self.repeatable):  # around the backward pass too, where checkpointed layers draw again

            def loss_of(example: int) -> Tensor:
                with FrozenStatistics():
                    batch = [example] if self.repeatable else examples
                    loss = runs.losses(batch)[batch.index(example)]
                alone[example] = loss.detach()
                return loss * (HEAVY if example == heavy else 1.0)

            losses = engine.losses(runs.losses, examples)
            weights = torch.tensor([HEAVY if i == heavy else 1.0 for i in examples], device="cpu")
            engine.backward(losses * weights.to(losses))
            sums = {name: parameter.grad for name, parameter in engine.model.named_parameters()}
            thresholds, rule = engine.thresholds.cpu(), engine.groups[0].clip_rule
            times = [examples.count(i) for i in some]
            truth = clipped_sums(engine.model, loss_of, some, engine.partition, thresholds, rule, times)
        self._check_losses(examples, losses.detach(), torch.stack([alone[i] for i in examples]))
        norms = truth.norms[:, [some.index(i) for i in examples]].double()
        finite = norms.nan_to_num(0, 0, 0)
        off = self.tolerance * norms + 1e-12 + NEGLIGIBLE * finite.norm(dim=0)
        usual = finite.masked_fill(weights > 1, 0).amax(1, keepdim=True) * weights
        self._check_norms(examples, engine.per_example_norms.cpu().double(), norms, off, usual)
        return self._check_sums(sums, truth, norms, off), truth.norms

    def _check_losses(self, examples: list[int], found: Tensor, alone: Tensor) -> None:
        for row in moved_losses(found, alone, self.loss_tolerance):
            i, n = examples[row], len(examples)
            seen = self.runs.first_difference([i], [i] * n, [0], mean=self.repeatable)
            raise UserError(
                f"Example {i} has loss {float(alone[row]):.6g} alone but {float(found[row]):.6g} in a batch: a "
                f"layer or the loss mixes the examples of a batch{seen}, so no example's influence is bounded: compute "
                "each loss from its own example alone; mask padding, and divide by the example's own length."
            )

    def _check_norms(self, examples: list[int], found: Tensor, norms: Tensor, off: Tensor, usual: Tensor) -> None:
        """Compare the norms (K, n) of the batch's rows; two non-finite norms count as equal.

        A norm that is exactly zero but for rounding may be off by a share of the group's largest norm, `usual` (K, n),
        and may be larger than in the loop by more, as bounds on rounding are added to it.
        """
        apart = (found - norms > off + ABOVE_ZERO * usual) | (norms - found > off + NEGLIGIBLE * usual)
        apart |= found.isfinite() != norms.isfinite()
        for k, row in apart.nonzero().tolist():
            group = self.engine.groups[k]
            layers = ", ".join(repr(member.name) for member in group.members[:3])
            layers += ", ..." if group.members[3:] else ""
            if not found[k, row].isfinite():
                raise UserError(
                    f"The gradient norm of example {examples[row]} in group {group.name!r} (of {layers}) overflows, so "
                    "training would leave the example out: scale its inputs or its loss down."
                )
            raise UserError(
                f"The gradient norm of example {examples[row]} in group {group.name!r} (of {layers}) is "
                f"{float(found[k, row]):.6g}, but {float(norms[k, row]):.6g} by a loop over single examples: a layer "
                f"there does not take the batch as first axis, in the order of the losses, or its rule is wrong; "
                f"{CONSTANT}."
            )

    def _check_sums(self, sums: dict[str, Tensor | None], truth: Reference, norms: Tensor, off: Tensor) -> float:
        """Errors are relative to Σ_i factor_i·‖g^(i)‖ of the parameter: the sum itself may cancel, and
        relative to its group a small layer's error would not show. Rounding of an exact zero is not an error."""
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
