"""Optimisers, learning-rate schedules and thresholds follow their configuration."""

import pytest
import torch

from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import PrivacyPlan, make_plan
from groupwise.training.from_config import make_optimizer, make_schedule, make_thresholds


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_each_name_is_torchs_optimiser_over_the_trainable_parameters(name: str, kind: type) -> None:
    config = OptimConfig(name=name, learning_rate=0.3, momentum=0.5, weight_decay=0.1, beta2=0.9, eps=1e-3)
    optimizer = make_optimizer(parameters(), config)
    assert type(optimizer) is kind
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.3, 0.1, 1)
    if name == "sgd":
        assert group["momentum"] == 0.5
    else:
        assert (group["betas"], group["eps"]) == ((0.9, 0.9), 1e-3)


def plan(groups: int, budget: float, sigma: float = 1.0) -> PrivacyPlan:
    given = {"dataset_size": 100, "expected_batch_size": 10, "steps": 3, "delta": 1e-3, "accountant": "rdp"}
    return make_plan(**given, noise_multiplier=sigma, num_groups=groups, quantile_budget=budget)


def test_a_single_threshold_is_not_rescaled() -> None:
    for groups, moves in ((1, True), (2, False)):
        thresholds = make_thresholds(ClipConfig(), plan(groups, 0.0, sigma=0.0))
        thresholds.update(torch.full((groups,), 10.0), 10, None, 0)
        assert bool((thresholds.clip_thresholds - groups**-0.5).abs().max() > 0.01) is moves


def rates(schedule: str, warmup: float = 0.0, steps: int = 100) -> list[float]:
    config = OptimConfig(learning_rate=2.0, schedule=schedule, warmup=warmup)
    optimizer = make_optimizer(parameters(), config)
    scheduler = make_schedule(optimizer, config, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_and_wastes_no_step_at_zero(schedule: str) -> None:
    seen = rates(schedule, warmup=0.1)
    assert seen[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert max(seen) == seen[10] == 2.0


def test_the_learning_rate_follows_its_schedule() -> None:
    assert rates("constant") == [2.0] * 100
    linear, cosine = rates("linear"), rates("cosine")
    assert (linear[0], linear[50], linear[-1]) == (2.0, 1.0, pytest.approx(2.0 / 100))
    assert (cosine[0], cosine[25], cosine[50]) == (2.0, pytest.approx(1 + 0.5**0.5), pytest.approx(1.0))
    assert cosine == sorted(cosine, reverse=True) and cosine[-1] > 0
