"""Noise on a pipeline: its distribution on each stage, independence between stages, and one budget for all."""

import math

import numpy as np
import pytest
from scipy import stats

from groupwise.errors import UserError
from groupwise.privacy import FixedThresholds
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import EXPECTED, QUANTILE, STEP, Case, make_trainer

SIGMA, DRAWS, THRESHOLDS = 1.3, 25, (0.4, 1.7)
EMPTY = ((),)


def noise_of(case: Case, ranks: Ranks, groups: int | None = None) -> tuple[np.ndarray, list[float], float]:
    """Gradients of empty batches, (DRAWS, parameters of the stage); thresholds of the steps; std that is reported."""
    trainer = make_trainer(case, ranks, EMPTY)
    if case.policy == "fixed":
        trainer.private.thresholds = FixedThresholds([THRESHOLDS[ranks.stage]] * len(trainer.private.engine.groups))
    if groups is not None:
        object.__setattr__(trainer.private.plan, "num_groups", groups)
    drawn, thresholds, reported = [], [], 0.0
    for step in range(DRAWS):
        thresholds.append(trainer.private.thresholds.clip_thresholds.tolist())
        reported = trainer.report(ranks.agree(*trainer.step(step)))["noise_norm"]
        drawn.append(np.concatenate([p.grad.flatten().numpy() for p in trainer.runner.stage.parameters()]))
    return np.array(drawn), thresholds, reported


def on_four_processes(rank: int, world: int) -> dict:
    """Two replicas of two stages."""
    ranks = Ranks(2)
    device = Case(sigma=SIGMA)
    return {
        "device": noise_of(device, ranks),
        "planted": noise_of(device, ranks, groups=1),
        "adaptive": noise_of(Case(sigma=SIGMA, policy="adaptive"), ranks),
        "flat": noise_of(Case(sigma=SIGMA, policy="adaptive", grouping="flat"), ranks),
    }


@pytest.fixture(scope="module")
def drawn():
    """Case → what each process drew."""
    found = run_ranks(on_four_processes, 4)
    return {name: [own[name] for own in found] for name in found[0]}


def one_budget(stds: list[float], thresholds: tuple[float, ...]) -> bool:
    """Whether Σ_k (C_k/std_k)² = 1/σ², for stds of the sums that were measured on thousands of draws."""
    spent = sum((c / std) ** 2 for c, std in zip(thresholds, stds, strict=True))
    return math.isclose(spent, 1 / SIGMA**2, rel_tol=0.03)


def test_each_stage_has_noise_of_its_own_scale_and_all_share_one_budget(drawn):
    stages = [noise for noise, _, _ in drawn["device"][:2]]
    stds = [SIGMA * math.sqrt(2) * c for c in THRESHOLDS]
    for noise, std in zip(stages, stds, strict=True):
        assert noise.size > 10_000
        assert stats.kstest(noise.flatten(), "norm", args=(0, std / EXPECTED)).pvalue > 1e-3
    assert one_budget([noise.std() * EXPECTED for noise in stages], THRESHOLDS)
    norm = math.sqrt(sum(std**2 * noise.shape[1] for std, noise in zip(stds, stages, strict=True))) / EXPECTED
    assert all(reported == pytest.approx(norm) for _, _, reported in drawn["device"])


def test_noise_without_the_root_of_the_number_of_stages_is_caught(drawn):
    stds = [noise.std() * EXPECTED for noise, _, _ in drawn["planted"][:2]]
    assert stds == pytest.approx([SIGMA * c for c in THRESHOLDS], rel=0.03)
    assert not one_budget(stds, THRESHOLDS)


def test_stages_and_steps_are_independent_and_replicas_equal(drawn):
    for name in ("device", "flat"):
        ranks = [noise for noise, _, _ in drawn[name]]
        for stage in (0, 1):
            assert np.array_equal(ranks[stage], ranks[stage + 2])
        size = min(ranks[0].shape[1], ranks[1].shape[1])
        for one, other in ((ranks[0][:, :size], ranks[1][:, :size]), (ranks[0][1:], ranks[0][:-1])):
            assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 5 / math.sqrt(one.size)


def test_each_stage_moves_its_threshold_by_independent_noise(drawn):
    logs = [np.log(np.array(thresholds)[:, 0]) for _, thresholds, _ in drawn["adaptive"]]
    moves = [np.diff(log) for log in logs]
    std = STEP * SIGMA * math.sqrt(2 / (4 * 0.1)) / EXPECTED  # η·σ_b/B with σ_b = σ√(K/4r)
    for stage in (0, 1):
        assert np.array_equal(moves[stage], moves[stage + 2])
        assert stats.kstest(moves[stage], "norm", args=(-STEP * (0.5 - QUANTILE), std)).pvalue > 1e-3
    assert abs(np.corrcoef(moves[0], moves[1])[0, 1]) < 5 / math.sqrt(DRAWS)
    assert not np.allclose(moves[0], moves[1])


def test_one_group_over_all_stages_has_one_threshold_and_one_noise_scale(drawn):
    found = drawn["flat"]
    assert all(thresholds == found[0][1] for _, thresholds, _ in found)
    scale = SIGMA / math.sqrt(1 - 0.1) / EXPECTED  # σ_new
    for noise, thresholds, _ in found[:2]:
        assert stats.kstest((noise / np.array(thresholds)).flatten(), "norm", args=(0, scale)).pvalue > 1e-3


def test_noise_that_would_need_other_stages_thresholds_is_refused():
    trainer = make_trainer(Case(stages=1, sigma=SIGMA), Ranks(), EMPTY)
    object.__setattr__(trainer.private.plan, "num_groups", 2)
    trainer.private.allocation = "global"
    with pytest.raises(UserError, match=r"noise\.allocation=equal_budget"):
        trainer.step(0)
