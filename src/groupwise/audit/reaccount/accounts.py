"""Computes ε from the record's numbers alone, by two libraries of others, whatever accountant the run used."""

import math
from collections.abc import Callable
from typing import Any

from groupwise.audit.reaccount.record import CannotTell, Disagrees, Record, same
from groupwise.privacy.accountants import COMPOSITION_FAILURES

LOOSE = 1e-3
"""By how much, relatively, a figure may lie below the bracket's lower end: PRV's is off by 1e-4 where ε is near 80."""
TIGHT = 1e-6
"""By how much ε may lie above the bound that is claimed: the error of the figure that it is compared with."""


def claim(record: Record) -> str:
    """The quoted ε is the bound of the plan's accountant, at the plan's δ, and within the target."""
    plan, spent = record.plan, record.json("privacy")["spent"]
    same(spent, {"delta": plan["delta"], "accountant": plan["accountant"]}, "spent", "the plan")
    bound = {"prv": spent["prv"]["upper"], "pld": spent["pld"], "rdp": spent["rdp"]}[plan["accountant"]]
    if plan["accountant"] == "pld" and bound is None:
        raise Disagrees("the accountant is pld, and spent.pld is empty")
    same(spent, {"epsilon": bound}, "spent", f"its own {plan['accountant']} bound")
    epsilon = float(spent["epsilon"])
    if epsilon > plan["epsilon"] * (1.0 + TIGHT):
        raise Disagrees(f"spent {epsilon:.6g} is more than the target {plan['epsilon']:.6g}")
    if not float(spent["prv"]["lower"]) <= float(spent["prv"]["estimate"]) <= float(spent["prv"]["upper"]):
        raise Disagrees("spent.prv is no bracket: lower <= estimate <= upper does not hold")
    return f"epsilon {epsilon:.4f} by {plan['accountant']}, target {plan['epsilon']:.4f}"


def by_dp_accounting(record: Record) -> str:
    """ε by dp_accounting's privacy loss distributions, from the numbers of privacy.json, agrees with the claim."""
    return _compared(record, _pld)


def by_prv_accountant(record: Record) -> str:
    """The same by prv_accountant as it comes, without the run's own choice of grid and tail."""
    return _compared(record, _prv)


def _compared(record: Record, bracket: Callable[..., tuple[float, float]]) -> str:
    given = _numbers(record)
    spent = record.json("privacy")["spent"]
    try:
        lower, upper = bracket(**given)
    except COMPOSITION_FAILURES as error:
        raise CannotTell(f"it gave no answer ({(str(error).splitlines() or [''])[0]})") from error
    low, high = _bracket(spent, record.plan["accountant"])
    words = f"{lower:.4f} to {upper:.4f}, the record has {low:.4f} to {high:.4f}"
    if lower > min(high, float(spent["rdp"])) * (1.0 + TIGHT) or upper < low * (1.0 - LOOSE):
        raise Disagrees(words)
    return words


def _numbers(record: Record) -> dict[str, Any]:
    plan, executed = record.plan, record.json("privacy")["executed_steps"]
    if plan["noise_multiplier"] == 0.0 or executed == 0:
        if executed and math.isfinite(float(record.json("privacy")["spent"]["epsilon"])):
            raise Disagrees("no noise was added, and the epsilon that is quoted is finite")
        raise CannotTell("no noise was added, so there is no epsilon to work out")
    rate = plan["expected_batch_size"] / plan["dataset_size"]
    if not (plan["noise_multiplier"] > 0.0 and 0.0 < rate <= 1.0 and 0.0 < plan["delta"] < 1.0 and executed > 0):
        raise Disagrees("the plan's numbers are no mechanism: a sigma, a rate or a delta is out of its range")
    return {
        "noise_multiplier": plan["noise_multiplier"],
        "sample_rate": rate,
        "steps": int(executed),
        "delta": plan["delta"],
    }


def _bracket(spent: dict[str, Any], accountant: str) -> tuple[float, float]:
    """The interval in which the record claims ε to lie; RDP and PLD give only an upper end."""
    return float(spent["prv"]["lower"]), float(spent["prv"]["upper"] if accountant == "prv" else spent["epsilon"])


def _pld(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    """A bracket: an upper bound, and that bound less the gain from halving the grid's interval.

    The error goes with the square of the interval, so at most a third of that gain is left.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    def bound(interval: float) -> float:
        release = from_gaussian_mechanism(
            noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=interval
        )
        return float(release.self_compose(steps).get_epsilon_for_delta(delta))

    coarse = bound(1e-2)  # says how finely ε is to be resolved
    few = min(1e-3, 1e-3 * coarse / steps)  # of few steps this moves an end by a thousandth at most
    interval = max(1e-4, few, min(1e-6 * coarse**2, 1e-4 * coarse))
    upper = bound(interval)
    return upper - abs(bound(2.0 * interval) - upper), upper


def _prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    import warnings

    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant = PRVAccountant(
            PoissonSubsampledGaussianMechanism(sampling_probability=sample_rate, noise_multiplier=noise_multiplier),
            max_self_compositions=steps,
            eps_error=0.02,
            delta_error=delta / 1000.0,
        )
        lower, _, upper = accountant.compute_epsilon(delta, [steps])
    return float(lower), float(upper)
