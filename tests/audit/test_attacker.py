"""The attacker's evidence for each canary has the distribution that the claimed plan implies."""

import numpy as np
import pytest
from scipy import stats

from groupwise.audit.attacker import Evidence, in_counts, log_ratio
from groupwise.audit.one_run import audit_one_run, present_canaries
from groupwise.audit.options import make_setting
from groupwise.clipping import clip_factors
from groupwise.clipping.factors import CLIP_RULES
from groupwise.privacy import mechanism

QUICK = ["privacy.noise_multiplier=1.0", "privacy.accountant=rdp"]


def normal(sample: np.ndarray) -> bool:
    """Whether a sample may be from N(0, 1), tested by its distribution and, more sensitively, its variance."""
    tail = stats.chi2.cdf(np.square(sample).sum(), len(sample))
    return bool(stats.kstest(sample, "norm").pvalue > 1e-3 and 1e-3 < tail < 1 - 1e-3)


def standardised(setting) -> tuple[np.ndarray, np.ndarray]:
    """The evidence of (absent, present) canaries, each N(0, 1) if noise and clipping are as planned."""
    _, evidence = audit_one_run(setting)
    present = present_canaries(setting)
    (step,) = evidence
    found = (step.found - step.power * present) / np.sqrt(step.power)
    return found[~present], found[present]


CELLS = [
    ["clip=flat"],
    ["clip=ghost"],
    ["clip=adaptive_flat"],
    ["clip=fixed_layer", "noise=weighted"],
    ["clip=fixed_layer", "clip.rule=automatic"],
    ["clip=adaptive_layer", "clip.quantile_budget=0.5", "noise=equal_budget"],
    ["clip=adaptive_block"],
]


@pytest.mark.parametrize("overrides", CELLS, ids=" ".join)
def test_evidence_has_the_planned_distribution(overrides):
    setting = make_setting([*overrides, *QUICK], canaries=600, seed=3)
    absent, present = standardised(setting)
    assert normal(absent) and normal(present)


def test_too_little_clipping_changes_the_distribution(monkeypatch):
    monkeypatch.setattr("groupwise.clipping.engine.check_rule", lambda rule: None)
    monkeypatch.setitem(CLIP_RULES, "min", lambda _: lambda norms, threshold: 1.5 * clip_factors(norms, threshold))
    monkeypatch.setattr("groupwise.build.verify", lambda *_, **__: None)
    absent, present = standardised(make_setting(["clip=fixed_layer", *QUICK], canaries=600, seed=3))
    assert normal(absent) and not normal(present)


def test_noise_that_is_a_fifth_too_small_changes_the_distribution(monkeypatch):
    noise_stds = mechanism.noise_stds
    monkeypatch.setattr(mechanism, "noise_stds", lambda *given, **more: 0.8 * noise_stds(*given, **more))
    absent, present = standardised(make_setting(["clip=flat", *QUICK], canaries=600, seed=3))
    assert not normal(absent) and not normal(present)


def test_counts_reveal_every_canary_with_the_planned_power(monkeypatch):
    """With nearly all of the budget on counts, the evidence has the power of the counts: K/(4σ_b²) per canary."""
    overrides = ["clip=adaptive_layer", "clip.quantile_budget=0.99", *QUICK]
    setting = make_setting(overrides, design="counts", canaries=256, seed=3)
    plan, (step,) = audit_one_run(setting)
    counts = 0.25 * 256 / plan.count_noise_multiplier**2
    assert np.allclose(step.power, counts, rtol=0.05) and counts > 0.9
    present = present_canaries(setting)
    found = (step.found - step.power * present) / np.sqrt(step.power)
    assert normal(found)


def test_covariance_of_other_canaries_is_removed():
    """With counts of many canaries in few groups, the evidence is still N(0, a) and N(a, a)."""
    random = np.random.default_rng(0)
    m, groups, std, chance = 400, 30, 2.0, 0.5
    bits = random.choice([-0.5, 0.5], (m, groups))
    out = []
    for _ in range(60):
        in_data = random.random(m) < chance
        released = in_data @ bits + std * random.standard_normal(groups)
        evidence = in_counts(released, bits, std, chance)
        out.append((evidence.found - evidence.power * in_data) / np.sqrt(evidence.power))
    assert np.std(out) == pytest.approx(1.0, abs=0.03) and abs(np.mean(out)) < 0.05


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_likelihood_ratio_has_mean_one_without_the_canary(rate):
    power = 0.7
    found = np.sqrt(power) * np.random.default_rng(0).standard_normal(200_000)
    ratios = np.exp(log_ratio(Evidence(found, np.full(len(found), power)), rate))
    assert ratios.mean() == pytest.approx(1.0, abs=0.02) and ratios.std() > 0.1
