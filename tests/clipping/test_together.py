"""Groups that close together, as on a GPU, where small operations are done for all of them at once: the same sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, clip_factors, factors, flat, group_pass, per_layer
from groupwise.clipping import groups as groups_file
from groupwise.clipping.factors import keep_finite
from groupwise.clipping.norm_terms import GramTerms, RowTerms, joined_sums, squares_together
from groupwise.errors import UserError
from tests.clipping.alone import assert_sums, gradients
from tests.clipping.conftest import BATCH
from tests.clipping.test_against_reference import MODES, each_case_in, truth_of
from tests.clipping.traced import clip, clip_batch

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")


@pytest.fixture
def together(as_on_a_gpu, monkeypatch):
    """Three groups at a time, with all that is done on a GPU alone."""
    monkeypatch.setattr(groups_file, "MOST_TOGETHER", 3)


@each_case_in("layer", "layer_gram", "layer_automatic", "block", "flat", "ghost")
def test_equal_to_single_examples(together, case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    with attach(case.model, make_partition(case.model), thresholds, **options) as engine:
        clip(engine, case.losses, range(BATCH))
    assert_sums(case.model, truth.sums, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-9)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)]
    return nn.Sequential(*layers)


def clipped(model: nn.Module, x: Tensor, weights: Tensor, **options) -> tuple[dict[str, Tensor], Tensor]:
    with attach(model, per_layer(model), 0.3, **options) as engine:
        clip_batch(engine, lambda x, w: model(x).flatten(1).square().sum(1) * w, x, weights)
        sums = gradients(model)
        model.zero_grad()
        return sums, engine.counts


@pytest.mark.parametrize("make_partition", [per_layer, flat])
def test_sums_of_equal_layers_are_made_at_once(together, monkeypatch, make_partition):
    made = []
    monkeypatch.setattr(group_pass, "joined_sums", lambda *given: made.append(joined_sums(*given)) or made[-1])
    model = nn.Sequential(*[nn.LayerNorm(4) for _ in range(3)])
    with attach(model, make_partition(model), 0.3) as engine:
        clip_batch(engine, lambda x: model(x).square().sum(1), torch.randn(5, 4))
    assert len(made) == 1 and len(made[0]) == 3


def test_groups_that_follow_each_other_close_together(together):
    model = network()
    engine = attach(model, per_layer(model), 0.3)
    assert [[other.index for other in group.together] for group in engine.groups] == [[0, 1, 2]] * 3 + [[3, 4]] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_not_finite_stays_out_of_every_sum(together, value):
    model, x = network(), torch.randn(4, 3, 4)
    weights = torch.tensor([1.0, 1.0, value, 1.0])
    found, counts = clipped(model, x, weights)
    kept = [0, 1, 3]
    expected, others = clipped(model, x[kept], weights[kept])
    torch.testing.assert_close(found, expected)
    assert torch.equal(counts, others)


def test_a_rule_of_ones_own_gets_several_groups_at_a_time(together):
    shapes = []

    def rule(norms: Tensor, threshold: Tensor) -> Tensor:
        shapes.append((norms.shape, threshold.shape))
        return (threshold / norms).clamp_max(1.0)

    model, x = network(), torch.randn(4, 3, 4)
    mine, _ = clipped(model, x, torch.ones(4), clip_rule=rule)
    usual, _ = clipped(model, x, torch.ones(4))
    assert shapes and all(norms[1:] == (4,) and at == (norms[0], 1) for norms, at in shapes)
    torch.testing.assert_close(mine, usual)


def test_a_layer_that_the_losses_do_not_reach_is_named(together):
    model = network()
    with attach(model, per_layer(model), 0.3) as engine:

        def losses_of(x: Tensor) -> Tensor:
            y = model[0](x)
            model[1](y)
            return model[4](model[3](model[2](y))).flatten(1).sum(1)

        with pytest.raises(UserError, match="reach no layer of group '1'"):
            clip_batch(engine, losses_of, torch.randn(4, 3, 4))


def test_terms_of_several_layers_are_each_layers_own():
    torch.manual_seed(0)
    sides = [(torch.randn(5, 6, d), torch.randn(5, 6, 3)) for d in (4, 7, 2)]
    reported = [[GramTerms(x @ x.mT, g @ g.mT, False, 7), RowTerms((None, g.sum(1)))] for x, g in sides]
    for (x, g), squares in zip(sides, squares_together(reported), strict=True):
        true = (g.mT @ x).square().sum((1, 2)) + g.sum(1).square().sum(1)
        torch.testing.assert_close(squares.float(), true, rtol=1e-4, atol=1e-5)
        assert bool((squares >= true * (1 - 1e-6)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_once_rounded_is_left_out(dtype):
    largest = torch.finfo(dtype).max
    steps = [largest * (1 + k * torch.finfo(dtype).eps / 8) for k in range(1, 9)]
    squares = torch.tensor([largest, *steps, math.inf], dtype=torch.float64)
    expected = [0.0 if math.isinf(each) else 1.0 for each in squares.to(dtype).tolist()]
    assert {0.0, 1.0} == set(expected)
    assert keep_finite(torch.ones(10), squares, dtype).tolist() == expected


@pytest.mark.parametrize(("examples", "numbers"), [(7, 40), (64, 3), (1, 9)])
@pytest.mark.parametrize("total", [False, True])
def test_rows_that_are_left_out_are_not_read(together, monkeypatch, examples, numbers, total):
    """Whatever those hold that are left out."""
    monkeypatch.setattr(factors, "is_async_device", lambda t: True)
    rows, weights = torch.randn(examples, numbers, 2, dtype=torch.float64), torch.rand(examples, dtype=torch.float64)
    before = torch.randn(numbers, 2, dtype=torch.float64) if total else None
    for gone in (torch.zeros(0, dtype=torch.long), torch.arange(0, examples, 3), torch.arange(examples)):
        spoilt, kept = rows.clone(), weights.clone()
        spoilt[gone], kept[gone] = torch.tensor([math.nan, -math.inf], dtype=torch.float64), 0.0
        expected = torch.einsum("i,i...->...", kept, rows) + (0.0 if before is None else before)
        found = factors.add_weighed_rows(None if before is None else before.clone(), factors.Factors.of(kept), spoilt)
        torch.testing.assert_close(found, expected)
