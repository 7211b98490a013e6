"""direct=True, where layers return clipped gradients themselves: sums match the reference, other models are refused."""

from functools import partial

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, automatic_factors, clip_factors, flat, per_block, per_layer
from groupwise.errors import UserError
from tests.clipping.conftest import CASES, make_case
from tests.clipping.modes import DIRECT, attached
from tests.clipping.test_against_reference import assert_equal_to_reference, truth_of
from tests.clipping.traced import clip, clip_batch

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
        pytest.param(name, mode, id=f"{name}-{mode}", marks=[pytest.mark.slow] if rarely else [])
        for number, name in enumerate(SIMPLE)
        for mode in MODES
        for rarely in [mode == "layer_automatic" and number % 9]  # a clip rule sees norms only
    ],
    indirect=["case"],
)
def test_clipped_sums_norms_and_counts_match_the_reference(case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    assert_equal_to_reference(case, make_partition(case.model), thresholds, truth, direct=True, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize(
    ("make", "make_partition", "norms", "message"),
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
def test_unsupported_partitions_and_layers_are_refused_by_name(double, make, make_partition, norms, message):
    model = make()
    with pytest.raises(UserError, match=message):
        attach(model, make_partition(model), 1.0, norms=norms, direct=True)


@pytest.mark.parametrize("mode", DIRECT)
def test_a_layer_that_runs_twice_is_refused(double, mode):
    case = make_case("reused_linear")
    with attached(case.model, mode) as engine, pytest.raises(UserError, match="Layer '0' runs twice"):
        clip(engine, case.losses, range(6))


def test_a_parameter_cast_to_half_precision_is_refused():
    model = nn.Sequential(nn.Linear(5, 3))
    with attached(model, "direct") as engine:
        model[0].weight = nn.Parameter(model[0].weight.detach().bfloat16())
        with pytest.raises(UserError, match=r"Layer '0' got its 'weight' in torch.bfloat16"):
            clip_batch(engine, lambda x: model(x).square().sum(1), torch.randn(4, 5))


def differences(layer: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The layer gets two rows of each example."""
    first, second = layer(torch.cat([a, b])).chunk(2)
    return (first - second).square().sum(1)


@pytest.mark.parametrize("mode", DIRECT)
@pytest.mark.parametrize(
    ("losses", "shapes"),
    [
        (differences, [(1, 3)] * 2),
        (differences, [(4, 3)] * 2),
        (lambda layer, x: layer(x.transpose(0, 1)).sum((0, 2)), [(4, 5, 3)]),
    ],
    ids=["two rows of one example", "two rows of each example", "sequences first"],
)
def test_layouts_without_one_row_per_example_are_refused(mode, losses, shapes):
    model = nn.Sequential(nn.Linear(3, 2))
    with (
        attached(model, mode, 0.3) as engine,
        pytest.raises(UserError, match="without one row for each example on the first axis"),
    ):
        clip_batch(engine, partial(losses, model), *(torch.randn(shape) for shape in shapes))
