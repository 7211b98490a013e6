"""GroupNorm in both memory layouts matches a loop over single examples."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.rules import normalization
from tests.clipping.alone import assert_exact, looped


@pytest.fixture(params=[None, 6])
def grid(monkeypatch, request) -> None:
    """Also with a GPU grid of only six groups, fewer than in the batch."""
    if request.param is not None:
        monkeypatch.setattr(normalization, "LARGEST_GRID", request.param)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).pow(3).sum(1)


MODELS = {
    "group": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)),
    "instance": lambda: nn.InstanceNorm2d(3, affine=True),
    "frozen bias": lambda: nn.GroupNorm(3, 3),
    "of vectors": lambda: nn.Sequential(nn.Flatten(), nn.GroupNorm(7, 147)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("groups", [flat, per_layer])
def test_sums_and_norms_match_a_loop_over_examples(double, grid, name, layout, groups) -> None:
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if name == "frozen bias":
        model.bias.requires_grad_(False)
    x = (torch.randn(5, 3, 7, 7) + 3).to(memory_format=layout)
    alone = looped(model, lambda i: loss(model, x[[i]].contiguous())[0], range(5))  # torch's own needs it contiguous
    with attach(model, groups(model), 1.0) as engine:
        assert_exact(engine, lambda rows: loss(model, x[list(rows)]), range(5), loop=alone)
        if name == "frozen bias":  # no other layer changes the layout
            with engine.forward(5):
                assert model(x).is_contiguous(memory_format=layout)
