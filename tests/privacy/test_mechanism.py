"""The release of a logical batch: noise is added to the sum once, and the result is divided by the configured B."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from groupwise.privacy.mechanism import ALLOCATIONS, noise_weights, release_gradients, sensitivity
from groupwise.privacy.noise import NoiseSource

SOURCE = NoiseSource.from_seed(0)


class Sums(NamedTuple):
    """Summed gradients of groups of parameters, in the place of an engine."""

    relation: str
    groups: list[list[nn.Parameter]]
    thresholds: torch.Tensor

    @property
    def sizes(self) -> list[int]:
        """The numbers of elements, as no group is sharded."""
        return [sum(parameter.numel() for parameter in group) for group in self.groups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_sums_get_their_groups_noise_and_are_divided_by_the_configured_batch_size(allocation, dtype):
    thresholds, sigma, batch = [0.1, 1.0, 5.0], 1.5, 256.0
    shapes, sizes = ([(10, 8), (80,)], [(60,)], [(5, 3, 5), (9,), ()]), [160, 60, 85]
    groups = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in group] for group in shapes]
    for parameter in (parameter for group in groups for parameter in group):
        parameter.grad = torch.ones_like(parameter)
    stds = release_gradients(
        Sums("add_remove", groups, torch.tensor(thresholds, dtype=torch.float64)), allocation=allocation,
        noise_multiplier=sigma, expected_batch_size=batch, noise=SOURCE, step=3,
    )  # fmt: skip
    weights = noise_weights(thresholds, sizes, allocation)
    torch.testing.assert_close(stds, sigma * sensitivity(thresholds, weights) * weights)
    each = SOURCE.add_gaussian_(torch.zeros(sum(sizes), dtype=dtype), 1.0, 3, 0)  # one sequence for all groups
    expected = (1.0 + stds.repeat_interleave(torch.tensor(sizes)) * each) / batch
    found = torch.cat([parameter.grad.flatten() for group in groups for parameter in group])
    torch.testing.assert_close(found, expected.to(dtype))
