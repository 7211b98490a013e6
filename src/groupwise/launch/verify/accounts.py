"""ε from the record's numbers alone, by accountants that the run did not use."""

from __future__ import annotations

import math
from typing import Any

from groupwise.launch.verify.check import CannotTell, Disagrees, same
from groupwise.launch.verify.fourier import epsilon_fourier
from groupwise.launch.verify.record import Record

LOOSE = 1e-3
"""By how much, relatively, a figure may lie below the bracket's lower end: PRV's is off by 1e-4 where ε is near 80."""
TIGHT = 1e-6
"""By how much ε may lie above the bound that is claimed: the error of the figure that it is compared with."""


def claim(record: Record) -> str:
    """The ε that is quoted is the bound of the plan's accountant, at the plan's δ, and within the target."""
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


def another_library(record: Record) -> str:
    """The accountant of another library, called with the numbers of privacy.json: its bracket meets the claimed one."""
    given = _numbers(record)
    spent = record.json("privacy")["spent"]
    other = "prv_accountant" if record.plan["accountant"] == "pld" or spent["prv"]["note"] else "dp_accounting PLD"
    try:
        lower, upper = _prv(**given) if other == "prv_accountant" else _pld(**given)
    except (RuntimeError, AssertionError, MemoryError) as error:
        raise CannotTell(f"{other} gave no answer ({str(error).splitlines()[0]})") from error
    low, high = _bracket(spent, record.plan["accountant"])
    words = f"{other} has {lower:.4f} to {upper:.4f}, the record {low:.4f} to {high:.4f}"
    if lower > high * (1.0 + TIGHT) or upper < low * (1.0 - LOOSE):
        raise Disagrees(words)
    return words


def own_integral(record: Record) -> str:
    """ε by a Fourier integral, without an accountant's code: inside the claimed bracket."""
    try:
        epsilon = epsilon_fourier(**_numbers(record))
    except ArithmeticError as error:
        raise CannotTell(str(error)) from error
    spent = record.json("privacy")["spent"]
    low, high = _bracket(spent, record.plan["accountant"])
    words = f"the integral has {epsilon:.4f}, the record {low:.4f} to {high:.4f}"
    if not low * (1.0 - LOOSE) <= epsilon <= high * (1.0 + TIGHT) or epsilon > float(spent["rdp"]) * (1.0 + TIGHT):
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
    """What the record claims ε to lie in; RDP and PLD alone give an upper end."""
    return float(spent["prv"]["lower"]), float(spent["prv"]["upper"] if accountant == "prv" else spent["epsilon"])


def _pld(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    from dp_accounting.pld import privacy_loss_distribution

    coarse = 0.0
    for interval in (1e-2, 1e-4):  # a first, rough figure says how finely ε is to be resolved
        interval = max(interval, min(1e-6 * coarse**2, 1e-4 * coarse))
        ends = []
        for pessimistic in (False, True):
            release = privacy_loss_distribution.from_gaussian_mechanism(
                noise_multiplier,
                sampling_prob=sample_rate,
                value_discretization_interval=interval,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            )
            ends.append(float(release.self_compose(steps).get_epsilon_for_delta(delta)))
        coarse = ends[1]
    return ends[0], ends[1]


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
