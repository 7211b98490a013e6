"""Parameters that modules use outside of layers: under activation checkpointing, and as the input of a layer."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import WSConv2d
from groupwise.errors import UserError
from tests.clipping.modes import FEW, attached
from tests.clipping.test_per_example import assert_exact, loop_over, of_rows
from tests.clipping.traced import clip
from tests.combinations import pairs_fast

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]


class CheckpointedPart(nn.Module):
    """A checkpointed part with parameters of its own."""

    def __init__(self, reentrant: bool = False):
        super().__init__()
        self.first, self.b, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 5), reentrant
        self.p, self.w = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        def part(y):
            return ((self.b(y) * self.p).sin() + y @ self.w) @ self.w.T

        return checkpoint(part, self.first(x) * self.p, use_reentrant=self.reentrant)


@pytest.mark.parametrize("mode", FEW)
def test_checkpointed_parameters_are_clipped_exactly(mode):
    model, x = CheckpointedPart(), torch.randn(3, 3, 5)
    loop = loop_over(model, x)
    for examples in ([1], [0, 2], [0, 1, 2]):  # 3: as many as positions
        assert_exact(model, x, mode, loop, examples)


class RelativePositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.value, self.rel = nn.Linear(5, 5), nn.Linear(5, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        def part(h):
            place = torch.arange(h.shape[1])
            scores = h @ h.mT + self.rel[place[:, None] - place + 2]
            return scores.softmax(-1) @ self.value(h)

        return checkpoint(part, self.first(x), use_reentrant=False)


@pytest.mark.parametrize("mode", FEW)
def test_as_many_examples_as_positions_are_recomputed_like_any_other_number(mode):
    model, x = RelativePositions(), torch.randn(3, 3, 5)
    loop = loop_over(model, x)
    for examples in ([0, 2], [0, 1, 2]):
        assert_exact(model, x, mode, loop, examples)


@pytest.mark.parametrize("mode", FEW)
def test_reentrant_checkpointing_is_refused(mode):
    model, x = CheckpointedPart(reentrant=True), torch.randn(4, 3, 5)
    with attached(model, mode) as engine, pytest.raises(UserError, match="use_reentrant=False"):
        clip(engine, of_rows(model, x), range(4))


LAYERS = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "circular": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 2),
    "standardised": lambda: WSConv2d(3, 4, 3),
    "standardised_gain": lambda: WSConv2d(3, 4, 3, gain=True),
    "group_norm": lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.Conv2d(3, 4, 3)),
}
"""Layers that also take inputs without a batch axis, except for group_norm."""
INPUTS = {
    "one": lambda p, b: p[:1],
    "three": lambda p, b: p,
    "expanded": lambda p, b: p[:1].expand(b, -1, -1, -1),
    "repeated": lambda p, b: p[:1].repeat(b, 1, 1, 1),
    "unbatched": lambda p, b: p[0],
}


class LearnedImage(nn.Module):
    """A parameter is the input of a layer; the output is then combined with the examples."""

    def __init__(self, make, how):
        super().__init__()
        self.image, self.layer, self.given = nn.Parameter(torch.randn(3, 3, 5, 5)), LAYERS[make](), nn.Linear(5, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(INPUTS[self.how](self.image, len(x))).mean((-2, -1))
        given = self.given(x)
        return (features.unsqueeze(0) * given.unsqueeze(1)).sum(1) if self.how == "three" else features * given


IMAGES = [
    cell
    for cell in product(LAYERS, INPUTS, FEW)
    if cell[:2] != ("group_norm", "unbatched")  # GroupNorm needs a batch axis
]


@pytest.mark.parametrize(("make", "how", "mode"), pairs_fast(IMAGES))
def test_a_parameter_as_the_input_of_a_layer_is_clipped_exactly(make, how, mode):
    assert_exact(LearnedImage(make, how), torch.randn(6, 5), mode)
