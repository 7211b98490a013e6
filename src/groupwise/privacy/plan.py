"""The privacy plan: the only source of noise scales, and a statement of the guarantee."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np

from groupwise.errors import UserError, warn
from groupwise.privacy.accountants import EpsilonBounds, check_release, is_whole, releases_epsilon
from groupwise.privacy.accounting import check_accountant, epsilon_bounds
from groupwise.privacy.calibration import calibrate, split_noise

PARTS = 20  # of a plan; `PrivacyPlan.progress` computes ε at the end of each


@dataclass(frozen=True)
class EpsilonReport:
    """The cost of ``executed_steps`` releases at ``delta``; ``epsilon`` is the upper bound of the plan's accountant.

    ``prv`` brackets ε, and its ``note`` says if another accountant replaced PRV. ``rdp`` and ``pld`` are upper bounds;
    ``pld`` is None unless it is the plan's accountant. ε is infinite without noise, and 0 without steps.
    ``guaranteed`` is False for infinite ε, and for shuffled batches, whose ε is that of Poisson samples.
    """

    executed_steps: int
    delta: float
    accountant: str
    prv: EpsilonBounds
    rdp: float
    pld: float | None
    guaranteed: bool

    @property
    def epsilon(self) -> float:
        """The ε to report."""
        if self.accountant == "pld" and self.pld is not None:
            return self.pld
        return self.rdp if self.accountant == "rdp" else self.prv.upper

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; an infinite ε is the string "inf"."""
        return finite_json({"epsilon": self.epsilon, **asdict(self)})


def finite_json(value: Any) -> Any:
    """Return ``value`` with infinite floats replaced by "inf", since JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return "inf" if isinstance(value, float) and math.isinf(value) else value


WIDTH = 80
"""Width of a statement in columns."""
_LIMITS = (
    "  Public: the number of examples and all settings. Not covered: choosing settings by their results, anything "
    "logged under nonprivate/, checkpoints (they hold the noise key), floating-point attacks."
)


def folded(text: str) -> str:
    """Wrap the text to lines of at most `WIDTH` columns, without a break inside "name = value"."""
    whole = text.replace(" = ", "\xa0=\xa0")
    lines = textwrap.fill(whole, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines.replace("\xa0", " ")


SAMPLINGS = ("poisson", "shuffle")


@dataclass(frozen=True)
class PrivacyPlan:
    """T releases of clipped gradients and clip counts, and the noise that makes them (ε, δ)-DP; see :func:`make_plan`.

    Formal guarantee (``is_private``): the parameters and thresholds of all T steps together are (``epsilon``,
    ``delta``)-DP when one training example is added to or removed from the data. N is public. Every step must draw a
    Poisson sample at rate ρ, add noise at σ_new to the gradient sums with
    :func:`~groupwise.privacy.mechanism.release_gradients`, and add noise at σ_b to the centred counts, both from a
    secret :class:`~groupwise.privacy.noise.NoiseSource`. One batch's gradients (sensitivity S, noise Sσ_new) and counts
    (sensitivity ½√K, noise σ_b) are one Gaussian release: 1/σ_new² + K/(4σ_b²) = 1/σ² (proposition on σ_new). The
    constructor raises :class:`UserError` if σ_b and σ_new do not follow from σ. It does not check that ε follows from
    σ: :func:`make_plan` computes one from the other, and :meth:`spent` recomputes ε.

    Attributes:
        dataset_size: N. expected_batch_size: B. steps: T. num_groups: K. quantile_budget: r, 0 for fixed thresholds.
        noise_multiplier: σ, of the whole release. count_noise_multiplier: σ_b = σ√(K/(4r)), 0 when r = 0.
        gradient_noise_multiplier: σ_new = σ/√(1-r).
        epsilon: infinity means no noise and no guarantee. note: which accountant replaced the requested one, and why.
    """

    dataset_size: int
    expected_batch_size: float
    steps: int
    epsilon: float
    delta: float
    num_groups: int
    quantile_budget: float
    noise_multiplier: float
    count_noise_multiplier: float
    gradient_noise_multiplier: float
    adjacency: str = "add_remove"
    sampling: str = "poisson"
    accountant: str = "prv"
    note: str = ""

    def __post_init__(self) -> None:
        size, batch, sigma = self.dataset_size, self.expected_batch_size, self.noise_multiplier
        if not is_whole(size) or size < 1:
            raise UserError(f"dataset_size is {size}; give the number of training examples N, at least 1.")
        if not 0.0 < batch <= size:
            raise UserError(f"expected_batch_size is {batch} for {size} examples; give B above 0 and at most N.")
        if self.adjacency != "add_remove":
            raise UserError(f"adjacency is {self.adjacency!r}; only 'add_remove' is accounted for.")
        if self.sampling not in SAMPLINGS:
            raise UserError(f"sampling is {self.sampling!r}; choose one of {', '.join(SAMPLINGS)}.")
        check_accountant(self.accountant)
        check_release(self.sample_rate, self.steps, self.delta)
        if not 0.0 <= sigma < math.inf or math.isnan(self.epsilon) or self.epsilon < 0.0:
            raise UserError(f"the plan has epsilon {self.epsilon} and sigma {sigma}; make it with make_plan.")
        if (sigma == 0.0) != math.isinf(self.epsilon):
            raise UserError("a plan must have noise if and only if its epsilon is finite; make it with make_plan.")
        expected = split_noise(sigma, self.num_groups, self.quantile_budget)
        given = (self.count_noise_multiplier, self.gradient_noise_multiplier)
        if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(given, expected, strict=True)):
            raise UserError(
                f"the plan's noise scales (sigma_b, sigma_new) are {given}, but sigma = {sigma} gives {expected}; make "
                "the plan with make_plan, and do not change it."
            )

    @property
    def sample_rate(self) -> float:
        """ρ = B/N."""
        return self.expected_batch_size / self.dataset_size

    @property
    def is_private(self) -> bool:
        """Whether (``epsilon``, ``delta``) is a guarantee: Poisson sampling, finite ε, and noise."""
        return self.sampling == "poisson" and math.isfinite(self.epsilon) and self.noise_multiplier > 0.0

    def statement(self) -> str:
        """Return the plan as text: the guarantee, the mechanism, its numbers, and what is not covered."""
        groups = f"{self.num_groups} clipping group{'s' if self.num_groups > 1 else ''}"
        sampling = (
            f"  {self.steps} steps with batches of {self.expected_batch_size:g} expected from {self.dataset_size} "
            f"examples ({self.sampling}, rate {self.sample_rate:.5g}), {groups}."
        )
        if self.noise_multiplier == 0.0:
            return "\n".join(["Privacy: none. No noise is added: there is no privacy guarantee.", folded(sampling)])
        accountant = "" if self.note else f"{self.accountant.upper()}, "  # the note names the accountant that was used
        headline = f"Privacy: epsilon = {self.epsilon:.4g} at delta = {self.delta:g} ({accountant}upper bound) "
        if self.sampling == "shuffle":
            headline += "as published, not a guarantee: batches are shuffled, but accounted as Poisson samples."
        else:
            headline += "for adding or removing one training example."
        noise = f"  Gaussian noise once a step, noise multiplier sigma = {self.noise_multiplier:.4f}"
        if self.quantile_budget == 0.0:
            noise += ", all of it on gradients."
        else:
            noise += (
                f"; counts use a share r = {self.quantile_budget:g}: sigma_b = {self.count_noise_multiplier:.4g} on "
                f"counts, sigma_new = {self.gradient_noise_multiplier:.4f} on gradients."
            )
        note = [f"  Note: epsilon was computed {self.note}. It is still an upper bound."] if self.note else []
        return "\n".join(map(folded, [headline, sampling, noise, *note, _LIMITS]))

    def progress(self, step: int) -> float:
        """Return an upper bound on the ε spent after ``step`` steps, for a progress bar.

        It is the ε at the end of the current twentieth of the plan, so that few values are computed. After the plan's
        last step it is computed by Rényi DP.
        """
        if step > self.steps:
            return self._bounds(step, "rdp").upper
        end = math.ceil(math.ceil(step * PARTS / self.steps) * self.steps / PARTS)
        return min(self.epsilon, self._bounds(end, self.accountant).upper)

    def spent(self, executed_steps: int) -> EpsilonReport:
        """Recompute ε for the executed steps. Steps that were repeated with new noise count as well.

        Takes up to two seconds, once in a process. Raises :class:`UserError` for a negative number of steps.
        """
        prv, rdp = self._bounds(executed_steps, "prv"), self._bounds(executed_steps, "rdp").upper
        pld = self._bounds(executed_steps, "pld").upper if self.accountant == "pld" else None
        return EpsilonReport(int(executed_steps), self.delta, self.accountant, prv, rdp, pld, self.is_private)

    def spent_epsilon(self, executed_steps: int) -> float:
        """Return the ``epsilon`` of :meth:`spent`, without the other accountants; raises as it does."""
        return self._bounds(executed_steps, self.accountant).upper

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; an infinite ε is the string "inf"."""
        return finite_json(asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild a plan from :meth:`to_dict`. Raises :class:`UserError` for missing, unknown or invalid values."""
        if odd := ", ".join(sorted({field.name for field in fields(cls)} ^ values.keys())):
            raise UserError(f"the saved plan is of another version: {odd} differ; make a new plan with make_plan.")
        return cls(**{**values, "epsilon": float(values["epsilon"])})

    def _bounds(self, executed: int, accountant: str) -> EpsilonBounds:
        if not is_whole(executed) or executed < 0:
            raise UserError(f"executed_steps is {executed}; give the number of released steps, 0 or more.")
        if executed == 0 or self.noise_multiplier == 0.0:
            cost = math.inf if executed else 0.0
            return EpsilonBounds(cost, cost, cost)
        return epsilon_bounds(self.noise_multiplier, self.sample_rate, int(executed), self.delta, accountant)


def make_plan(
    *,
    dataset_size: int,
    expected_batch_size: float,
    steps: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    num_groups: int = 1,
    quantile_budget: float = 0.0,
    sampling: str = "poisson",
    accountant: str = "prv",
) -> PrivacyPlan:
    """Make a plan from exactly one of ε (σ is calibrated) and σ = ``noise_multiplier`` (ε is computed).

    ``epsilon=inf`` or ``noise_multiplier=0`` plans a run without noise and without a guarantee. With
    ``sampling="shuffle"`` σ is that of Poisson samples, and the plan says that its ε is not a guarantee. Numpy scalars
    are converted to Python numbers, so that the plan can be saved. Warns if δ ≥ 1/N.
    Raises :class:`UserError` for a value out of range.

    The arguments are the attributes of :class:`PrivacyPlan`: ``dataset_size`` is N, ``expected_batch_size`` B,
    ``steps`` T, ``num_groups`` K and ``quantile_budget`` r.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise UserError("give exactly one of epsilon and noise_multiplier; the plan computes the other.")
    noiseless = PrivacyPlan(  # its constructor checks the settings before σ is calibrated
        dataset_size=_python(dataset_size),
        expected_batch_size=_python(expected_batch_size),
        steps=_python(steps),
        delta=_python(delta),
        num_groups=_python(num_groups),
        quantile_budget=_python(quantile_budget),
        sampling=sampling,
        accountant=accountant,
        epsilon=math.inf,
        noise_multiplier=0.0,
        count_noise_multiplier=0.0,
        gradient_noise_multiplier=0.0,
    )
    if noise_multiplier == 0.0 or epsilon == math.inf:
        return noiseless
    if epsilon is None:
        sigma = _python(noise_multiplier)
        bounds = epsilon_bounds(sigma, noiseless.sample_rate, noiseless.steps, noiseless.delta, accountant)
        shown = bounds.upper
    else:
        shown = _python(epsilon)
        sigma, bounds = calibrate(shown, noiseless.delta, noiseless.sample_rate, noiseless.steps, accountant)
    if delta >= 1.0 / dataset_size:
        warn(
            f"delta = {delta:g} is not below 1/N = {1.0 / dataset_size:.3g}. Such a delta allows publishing an example "
            "outright; give a smaller one."
        )
    counts, gradients = split_noise(sigma, noiseless.num_groups, noiseless.quantile_budget)
    return replace(
        noiseless,
        epsilon=shown,
        noise_multiplier=sigma,
        count_noise_multiplier=counts,
        gradient_noise_multiplier=gradients,
        note=bounds.note,
    )


def composed_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Return the joint ε at ``delta`` of several trainings on the same data, one plan each: the smaller of PLD and RDP.

    Formal guarantee: all releases of the plans together are (ε, δ)-DP, even if a training starts from the weights of an
    earlier one. No plan may depend on the data or on the results of other trainings. ε is infinite if a plan is not
    ``is_private``. Raises :class:`UserError` for a δ outside (0, 1).
    """
    if not 0.0 < delta < 1.0:
        raise UserError(f"delta is {delta}; give a probability strictly between 0 and 1, below 1/N.")
    if not all(plan.is_private for plan in plans):
        return math.inf
    releases = [(plan.noise_multiplier, plan.sample_rate, plan.steps) for plan in plans]
    return releases_epsilon(releases, delta) if releases else 0.0


def _python(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number
