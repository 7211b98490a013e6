"""The release of a logical batch: sum, noise once, divide by the configured B; and what one example can move."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import attach, per_layer
from groupwise.errors import UserError
from groupwise.privacy.mechanism import ALLOCATIONS, noise_weights, release_gradients, sensitivity
from groupwise.privacy.noise import NoiseSource
from tests.clipping.traced import clip

SOURCE = NoiseSource.from_seed(0)


def make_groups(*shapes, dtype=torch.float32) -> list[list[nn.Parameter]]:
    """One group for each tuple of shapes, with gradients that are all 1."""
    groups = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in group] for group in shapes]
    for parameter in (parameter for group in groups for parameter in group):
        parameter.grad = torch.ones_like(parameter)
    return groups


class Sums(NamedTuple):
    """Sums in the .grad of groups of parameters, by no engine."""

    relation: str
    groups: list[list[nn.Parameter]]
    thresholds: torch.Tensor

    @property
    def sizes(self) -> list[int]:
        """All of each group is here."""
        return [sum(parameter.numel() for parameter in group) for group in self.groups]


def release(groups, thresholds, **options) -> torch.Tensor:
    defaults = {"allocation": "global", "noise_multiplier": 1.0, "expected_batch_size": 4.0, "noise": SOURCE, "step": 0}
    thresholds = torch.as_tensor(thresholds, dtype=torch.float64)
    return release_gradients(Sums("add_remove", groups, thresholds), **{**defaults, **options})


def flat(group) -> np.ndarray:
    return torch.cat([parameter.grad.flatten() for parameter in group]).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_group_is_noised_at_its_own_scale(follows_normal, allocation, dtype):
    thresholds, sigma, batch = [0.1, 1.0, 5.0], 1.5, 256.0
    groups = make_groups([(100, 80), (80,)], [(6000,)], [(50, 30, 5), (9,)], dtype=dtype)
    sizes = [8080, 6000, 7509]
    stds = release(groups, thresholds, allocation=allocation, noise_multiplier=sigma, expected_batch_size=batch, step=3)
    weights = noise_weights(thresholds, sizes, allocation)
    assert stds.tolist() == pytest.approx((sigma * sensitivity(thresholds, weights) * weights).tolist())
    for group, std in zip(groups, stds.tolist(), strict=True):
        noise = flat(group) * batch - 1.0
        assert follows_normal(noise, std)
        assert not follows_normal(noise, std * 2 / 3)
        assert not follows_normal(noise, std * 3 / 2)


def test_the_sum_is_noised_and_then_divided_by_the_configured_batch_size():
    groups = make_groups([(3,)], dtype=torch.float64)
    (std,) = release(groups, [2.0], noise_multiplier=0.7, expected_batch_size=8.0, step=5).tolist()
    noise = SOURCE.add_gaussian_(torch.zeros(3, dtype=torch.float64), 0.7 * 2.0, 5, 0)
    assert std == pytest.approx(1.4)
    assert torch.allclose(groups[0][0].grad, (1.0 + noise) / 8.0, rtol=1e-12)


def test_an_empty_batch_is_noise_only():
    groups = make_groups([(4,)], [(2,)])
    for (parameter,) in groups:
        parameter.grad = None
    release(groups, [1.0, 1.0], expected_batch_size=1.0)
    empty = [flat(group) for group in groups]
    zero = make_groups([(4,)], [(2,)])
    for (parameter,) in zero:
        parameter.grad.zero_()
    release(zero, [1.0, 1.0], expected_batch_size=1.0)
    assert all(np.array_equal(a, flat(b)) and np.all(a != 0) for a, b in zip(empty, zero, strict=True))


def test_without_noise_the_mean_is_left():
    groups = make_groups([(3,)])
    assert release(groups, [1.0], noise_multiplier=0.0).tolist() == [0.0]
    assert flat(groups[0]).tolist() == [0.25] * 3


def test_stages_that_release_on_their_own_spend_the_budget_of_one(follows_normal):
    """Stages of 1 and of 2 groups, with sources of their own: the noise that is really there, group by group."""
    sigma, batch = 1.5, 8.0
    thresholds = [[0.1], [2.0, 0.4], [5.0]]
    noises, budget, planted = [], 0.0, 0.0
    for stage, own in enumerate(thresholds):
        groups = make_groups(*[[(9000,)]] * len(own))
        stds = release(
            groups,
            own,
            allocation="equal_budget",
            noise_multiplier=sigma,
            expected_batch_size=batch,
            noise=NoiseSource.from_key(SOURCE.derive(f"stage {stage}"), SOURCE.is_secret),
            groups_elsewhere=4 - len(own),
        )
        for group, threshold, std in zip(groups, own, stds.tolist(), strict=True):
            noise = flat(group) * batch - 1.0
            assert follows_normal(noise, sigma * math.sqrt(4) * threshold)
            assert not follows_normal(noise, sigma * threshold)  # without the root of K
            budget, planted = budget + (threshold / std) ** 2, planted + (threshold / (sigma * threshold)) ** 2
            noises.append(noise / threshold)
    assert math.isclose(budget, sigma**-2)
    assert not math.isclose(planted, sigma**-2)
    assert np.abs(np.corrcoef(np.stack(noises)) - np.eye(4)).max() < 5 / math.sqrt(9000)


def test_tied_parameters_in_two_groups_are_refused():
    tied = nn.Parameter(torch.zeros(3))
    for groups in ([[tied], [tied]], [[tied, tied]]):
        with pytest.raises(UserError, match="tied weights"):
            release(groups, [1.0] * len(groups))


def test_nothing_is_noised_before_a_refusal_of_the_groups():
    tied, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    with pytest.raises(UserError):
        release([[other], [tied], [tied]], [1.0] * 3)
    assert other.grad.tolist() == [1.0] * 3


def test_half_precision_gradients_are_refused():
    with pytest.raises(UserError, match="float32"):
        release(make_groups([(3,)], dtype=torch.bfloat16), [1.0])


@pytest.mark.parametrize(
    ("thresholds", "options", "reason"),
    [
        ([1.0, 1.0], {}, "one of each"),
        ([0.0], {}, "above 0"),
        ([1.0], {"expected_batch_size": 0.0}, "expected_batch_size"),
        ([1.0], {"expected_batch_size": math.nan}, "expected_batch_size"),
        ([1.0], {"expected_batch_size": math.inf}, "expected_batch_size"),
        ([1.0], {"noise_multiplier": -1.0}, "noise_multiplier"),
        ([1.0], {"allocation": "fair"}, "allocation"),
        ([1.0], {"allocation": "weighted", "groups_elsewhere": 1}, "equal_budget"),
        ([1.0], {"allocation": "equal_budget", "groups_elsewhere": -1}, "groups_elsewhere is -1"),
    ],
)
def test_refusals(thresholds, options, reason):
    with pytest.raises(UserError, match=reason):
        release(make_groups([(3,)]), thresholds, **options)


class TestNeighbours:
    """Leaving one example out of a batch moves the weighted sums by at most S, and the counts by exactly ½√K."""

    THRESHOLDS = (0.05, 0.3, 1.0)

    @pytest.fixture
    def parts(self):
        """Model, inputs and targets, with examples of very different gradients."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        scale = torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
        return model, torch.randn(8, 6, dtype=torch.float64) * scale, torch.randint(0, 3, (8,))

    def clipped(self, parts, keep, thresholds=THRESHOLDS):
        model, inputs, targets = parts
        model.zero_grad()

        def losses_of(rows):
            some = list(rows)
            return 5.0 * F.cross_entropy(model(inputs[some]), targets[some], reduction="none")

        with attach(model, per_layer(model), thresholds) as engine:
            clip(engine, losses_of, keep, traced_on=range(8))
            sums = [torch.cat([p.grad.flatten() for p in group.parameters]).clone() for group in engine.groups]
            return sums, engine.counts - 0.5 * len(keep)

    def worst(self, parts, weights, clip_at=THRESHOLDS):
        """The largest weighted distance between the whole batch and one without an example; and that of the counts."""
        everyone = list(range(8))
        whole, counts = self.clipped(parts, everyone, clip_at)
        distances, moved = [], []
        for left_out in everyone:
            rest, fewer = self.clipped(parts, [i for i in everyone if i != left_out], clip_at)
            parts_moved = [((a - b).norm() / w) ** 2 for a, b, w in zip(whole, rest, weights.tolist(), strict=True)]
            distances.append(math.sqrt(sum(parts_moved)))
            moved.append(float((counts - fewer).norm()))
        return max(distances), moved

    @pytest.mark.parametrize("allocation", ALLOCATIONS)
    def test_one_example_moves_no_more_than_was_accounted_for(self, parts, allocation):
        weights = noise_weights(self.THRESHOLDS, [56, 72, 27], allocation)
        bound = sensitivity(self.THRESHOLDS, weights)
        worst, counts = self.worst(parts, weights)
        assert 0.5 * bound < worst <= bound * (1 + 1e-6)
        assert counts == pytest.approx([0.5 * math.sqrt(3)] * 8)

    def test_the_check_catches_clipping_at_other_thresholds_than_the_noise_is_for(self, parts):
        weights = noise_weights(self.THRESHOLDS, [56, 72, 27], "equal_budget")
        worst, _ = self.worst(parts, weights, clip_at=tuple(2 * c for c in self.THRESHOLDS))
        assert worst > sensitivity(self.THRESHOLDS, weights)


def test_each_entry_has_noise_of_its_own_counted_through_the_groups():
    groups = make_groups([(3,), (4,)], [(5,)], dtype=torch.float64)
    for parameter in (p for group in groups for p in group):
        parameter.grad.zero_()
    release(groups, [1.0, 1.0], expected_batch_size=1.0, allocation="equal_budget", step=2)
    released = torch.cat([parameter.grad for group in groups for parameter in group])
    assert torch.allclose(released, SOURCE.add_gaussian_(torch.zeros_like(released), math.sqrt(2.0), 2, 0), rtol=1e-12)


def test_of_a_sharded_parameter_this_process_noises_its_own_shard():
    """A DTensor's `to_local` gives a view of what this process holds."""
    parameter = make_groups([(6,)])[0][0]
    gradient = parameter.grad
    parameter.to_local = lambda: parameter.data[:3]
    gradient.to_local = lambda: gradient[:3]
    release([[parameter]], [1.0], expected_batch_size=1.0)
    assert gradient[3:].tolist() == [1.0] * 3
    assert not bool((gradient[:3] == 1.0).any())
