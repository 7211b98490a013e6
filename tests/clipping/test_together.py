"""Several groups are clipped together, as on a GPU, to save small operations: sums match the reference."""

import math

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, clip_factors, per_layer
from groupwise.clipping import groups as groups_module
from groupwise.clipping.factors import keep_finite
from tests.clipping.alone import assert_sums, gradients
from tests.clipping.conftest import BATCH
from tests.clipping.test_against_reference import MODES, each_case_in, truth_of
from tests.clipping.traced import clip, clip_batch

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")


@pytest.fixture
def together(as_on_a_gpu, monkeypatch):
    """Three groups at a time, and everything else as on a GPU."""
    monkeypatch.setattr(groups_module, "MOST_TOGETHER", 3)


@each_case_in("layer", "layer_gram", "layer_automatic", "block", "flat", "ghost")
def test_sums_and_norms_match_the_reference(together, case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    with attach(case.model, make_partition(case.model), thresholds, **options) as engine:
        clip(engine, case.losses, range(BATCH))
    assert_sums(case.model, truth.sums, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-9)


def test_a_custom_clip_rule_gets_several_groups_at_once(together):
    shapes = []

    def rule(norms: Tensor, threshold: Tensor) -> Tensor:
        shapes.append((norms.shape, threshold.shape))
        return (threshold / norms).clamp_max(1.0)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3))
    x, sums = torch.randn(4, 3, 4), []
    for options in ({"clip_rule": rule}, {}):
        with attach(model, per_layer(model), 0.3, **options) as engine:
            clip_batch(engine, lambda x: model(x).flatten(1).square().sum(1), x)
        sums.append(gradients(model))
        model.zero_grad()
    assert shapes[2:] and all(norms[1:] == (4,) and at == (norms[0], 1) for norms, at in shapes[2:])  # 2 by `attach`
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_that_overflow_when_rounded_are_left_out(dtype):
    largest = torch.finfo(dtype).max
    steps = [largest * (1 + k * torch.finfo(dtype).eps / 8) for k in range(1, 9)]
    squares = torch.tensor([largest, *steps, math.inf], dtype=torch.float64)
    expected = [0.0 if math.isinf(each) else 1.0 for each in squares.to(dtype).tolist()]
    assert {0.0, 1.0} == set(expected)
    assert keep_finite(torch.ones(10), squares, dtype).tolist() == expected
