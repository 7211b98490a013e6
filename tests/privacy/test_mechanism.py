"""The release of a logical batch: sum, noise once, divide by the configured B; and what one example can move."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.privacy.mechanism import ALLOCATIONS, noise_weights, release_gradients, sensitivity
from groupwise.privacy.noise import NoiseSource

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
    groups = make_groups([(100, 80), (80,)], [(6000,)], [(50, 30, 5), (9,), ()], dtype=dtype)
    sizes = [8080, 6000, 7510]
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allocation": "equal_budget", "groups_elsewhere": -1}, "groups_elsewhere is -1"),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(UserError, match=reason):
        release(make_groups([(3,)]), [1.0], **options)


def test_each_entry_has_noise_of_its_own_counted_through_the_groups():
    groups = make_groups([(3,), (4,)], [(5,)], dtype=torch.float64)
    for parameter in (p for group in groups for p in group):
        parameter.grad.zero_()
    release(groups, [1.0, 1.0], expected_batch_size=1.0, allocation="equal_budget", step=2)
    released = torch.cat([parameter.grad for group in groups for parameter in group])
    assert torch.allclose(released, SOURCE.add_gaussian_(torch.zeros_like(released), math.sqrt(2.0), 2, 0), rtol=1e-12)
