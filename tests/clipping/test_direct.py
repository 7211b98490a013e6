"""direct=True: layers return clipped gradients themselves. The same sums as through a gate, and what it cannot do."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import attach, automatic_factors, clip_factors, flat, per_block, per_layer
from groupwise.errors import UserError
from tests.clipping.alone import assert_equal, gradients
from tests.clipping.conftest import CASES, make_case
from tests.clipping.test_against_reference import assert_equal_to_reference, truth_of
from tests.clipping.traced import clip, clip_batch, trace_batch

REFUSED = ("fallback", "reused", "tied", "parametrized", "conv_transpose", "frozen_transposed", "std_conv")
SIMPLE = [name for name in CASES if not name.startswith(REFUSED)]
MODES = {
    "layer": (per_layer, {}),
    "layer_gram": (per_layer, {"formula": "gram"}),
    "layer_materialized": (per_layer, {"formula": "materialize"}),
    "layer_automatic": (per_layer, {"clip_rule": automatic_factors(0.01)}),
    "ghost": (flat, {"norms": "ghost"}),
}


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(name, mode, id=f"{name}-{mode}", marks=[pytest.mark.slow] if rule_again else [])
        for number, name in enumerate(SIMPLE)
        for mode in MODES
        for rule_again in [mode == "layer_automatic" and number % 9]  # a clip rule sees norms, no layer
    ],
    indirect=["case"],
)
def test_clipped_sums_norms_and_counts(case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    assert_equal_to_reference(case, make_partition(case.model), thresholds, truth, direct=True, **options)


def squares_of(model: Callable) -> Callable:
    """Losses (n,) of rows, through a model."""
    return lambda *batch: model(*batch).square().sum(1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize(("make_partition", "norms"), [(per_layer, "bookkeeping"), (flat, "ghost")])
def test_microbatches_dropped_forwards_and_checkpoints_change_nothing(double, make_partition, norms):
    model, x = mlp(), torch.randn(6, 5)
    found = []
    for direct in (False, True):
        model.zero_grad()
        with attach(model, make_partition(model), 0.3, norms=norms, direct=direct) as engine:
            for rows in (x[:4], x[4:]):
                run = partial(checkpoint, model, use_reentrant=False) if direct else model
                if direct:
                    trace_batch(engine, squares_of(run), x)
                    for dropped in (rows, rows[:1]):
                        with engine.forward(len(dropped)):
                            model(dropped)  # its losses never come
                clip_batch(engine, squares_of(run), rows)
            found.append((gradients(model), engine.counts))
    assert_equal(found[1][0], found[0][0], rtol=1e-12)
    assert torch.equal(found[0][1], found[1][1])


def test_parameters_are_looked_up_when_the_layer_runs(double):
    """As fully_shard does it: another tensor in the module's place for every pass."""
    model, x = mlp(), torch.randn(6, 5)
    twin = copy.deepcopy(model)
    with attach(twin, per_layer(twin), 0.3) as engine:
        clip_batch(engine, squares_of(twin), x)
    with attach(model, per_layer(model), 0.3, direct=True) as engine:
        for layer in (model[0], model[2], model[4]):
            for name in ("weight", "bias"):
                setattr(layer, name, nn.Parameter(getattr(layer, name).detach().clone()))
        clip_batch(engine, squares_of(model), x)
        assert all(p is q for p, q in zip(engine.groups[0].parameters, model[0].parameters(), strict=True))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize(
    ("make", "make_partition", "norms", "says"),
    [
        *(
            (lambda: nn.Sequential(mlp(), mlp()), of, "bookkeeping", r"Layer '0.0' shares group .* one group a layer")
            for of in (flat, per_block)
        ),
        (lambda: make_case("tied").model, per_layer, "bookkeeping", "Layer 'wte' shares a parameter"),
        (lambda: make_case("tied").model, flat, "ghost", "Layer 'wte' shares a parameter"),
        (
            lambda: make_case("fallback_own_parameter").model,
            *(per_layer, "bookkeeping", r"in a module \(Scale\) without a rule"),
        ),
    ],
)
def test_what_cannot_be_direct_is_refused_by_name(double, make, make_partition, norms, says):
    model = make()
    with pytest.raises(UserError, match=says):
        attach(model, make_partition(model), 1.0, norms=norms, direct=True)


class TestRefusals:
    """Each names the layer."""

    @pytest.mark.parametrize(("make_partition", "norms"), [(per_layer, "bookkeeping"), (flat, "ghost")])
    def test_a_layer_that_runs_twice(self, double, make_partition, norms):
        case = make_case("reused_linear")
        with attach(case.model, make_partition(case.model), 1.0, norms=norms, direct=True) as engine:  # noqa: SIM117
            with pytest.raises(UserError, match="Layer 'layer' runs twice"):
                clip(engine, case.losses, range(6))

    def test_half_precision_that_a_shard_turns_into(self):
        model = nn.Sequential(nn.Linear(5, 3))
        with attach(model, per_layer(model), 1.0, direct=True) as engine:
            model[0].weight = nn.Parameter(model[0].weight.detach().bfloat16())
            with pytest.raises(UserError, match=r"Layer '0' got '0.weight' in torch.bfloat16"):
                clip_batch(engine, squares_of(model), torch.randn(4, 5))


class Pairs(nn.Module):
    """Two rows of its layer for each example."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a, b):
        first, second = self.layer(torch.cat([a, b])).chunk(2)
        return (first - second).square().sum(1)


@pytest.mark.parametrize("mode", ["layer", "ghost"])
@pytest.mark.parametrize(
    ("make", "losses", "shapes"),
    [
        (Pairs, lambda model, a, b: model(a, b), [(1, 3)] * 2),
        (Pairs, lambda model, a, b: model(a, b), [(4, 3)] * 2),
        (lambda: nn.Linear(3, 2), lambda model, x: model(x.transpose(0, 1)).sum((0, 2)), [(4, 5, 3)]),
    ],
    ids=["two rows of one", "two rows of each", "sequences first"],
)
def test_other_layouts_are_refused(mode, make, losses, shapes):
    (make_partition, options), model = MODES[mode], make()
    with (
        attach(model, make_partition(model), 0.3, direct=True, **options) as engine,
        pytest.raises(UserError, match="without one row for each example on the first axis"),
    ):
        clip_batch(engine, partial(losses, model), *(torch.randn(shape) for shape in shapes))
