"""Every mode with every layer rule matches a float64 loop over single examples, to 1e-9 relative."""

from functools import cache

import pytest
import torch

from groupwise.clipping import attach, automatic_factors, by_mapping, clip_factors, flat, per_layer
from groupwise.clipping.reference import Reference, clipped_sums
from tests.clipping import modes
from tests.clipping.alone import assert_bounded, assert_sums, looped, middle_thresholds
from tests.clipping.conftest import CASES, make_case
from tests.clipping.traced import clip

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")

MODES = {
    **{mode: modes.MODES[mode] for mode in ("flat", "ghost", "layer", "block")},
    "layer_gram": modes.MODES["gram"],
    "layer_materialized": modes.MODES["materialized"],
    "flat_gram": (flat, {"formula": "gram"}),
    "flat_materialized": (flat, {"formula": "materialize"}),
    "layer_automatic": (per_layer, {"clip_rule": automatic_factors(0.01)}),
}


@cache
def distinct(name: str) -> list[str]:
    """The modes without duplicates: in some models per_block is per_layer, or there is only one group."""
    model, found = CASES[name][0](), {}
    for mode, (make_partition, options) in MODES.items():
        found.setdefault((tuple(group.layers for group in make_partition(model)), str(options)), mode)
    return list(found.values())


def is_slow(number: int, name: str, mode: str) -> bool:
    """Each case runs a formula in one of two partitions, in turn; a clip rule sees norms only, so few cases do."""
    if mode == "layer_automatic":
        return number % 9 > 0
    formula = mode.partition("_")[2]
    both = {f"flat_{formula}", f"layer_{formula}"}
    return bool(formula) and both.issubset(distinct(name)) and mode != sorted(both)[(number + (formula == "gram")) % 2]


def each_case_in(*modes: str) -> pytest.MarkDecorator:
    """Every layer type and unusual use, in those of `modes` that differ for it."""
    cases = [
        pytest.param(name, mode, id=f"{name}-{mode}", marks=[pytest.mark.slow] if is_slow(number, name, mode) else [])
        for number, name in enumerate(CASES)
        for mode in distinct(name)
        if mode in modes
    ]
    return pytest.mark.parametrize(("case", "mode"), cases, indirect=["case"])


@cache
def loop_over(name):
    """A case's model and the gradients of its six examples, cached for all partitions and rules."""
    torch.manual_seed(0)  # the same weights and inputs as from the fixture
    case = make_case(name)
    return case.model, looped(case.model, case.loss_of, range(6))


@cache
def truth_of(name, make_partition, rule=clip_factors) -> tuple[list[float], Reference]:
    """Thresholds between the norms of a case, and its clipped sums, cached for all modes that share them."""
    model, loss_of = loop_over(name)
    partition = make_partition(model)
    thresholds = middle_thresholds(model, loss_of, partition, range(6))
    return thresholds, clipped_sums(model, loss_of, range(6), partition, thresholds, rule)


def assert_equal_to_reference(case, partition, thresholds, truth, **options) -> None:
    with attach(case.model, partition, thresholds, **options) as engine:
        clip(engine, case.losses, range(6))
        assert_sums(case.model, truth.sums)
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-9)
        assert torch.equal(engine.counts, truth.counts)


@each_case_in(*MODES)
def test_clipped_sums_norms_and_counts_match_the_reference(case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    assert_equal_to_reference(case, make_partition(case.model), thresholds, truth, **options)


def test_partition_by_mapping_matches_the_reference(double):
    case = make_case("conv2d")
    partition = by_mapping(case.model, {"0": "first", "*": "rest"})
    assert [group.layers for group in partition] == [("0",), ("2",)]
    thresholds = middle_thresholds(case.model, case.loss_of, partition, range(6))
    truth = clipped_sums(case.model, case.loss_of, range(6), partition, thresholds)
    assert_equal_to_reference(case, partition, thresholds, truth)


def test_no_example_exceeds_its_threshold(case):
    partition = per_layer(case.model)
    thresholds = [0.5 * c for c in truth_of(case.name, per_layer)[0]]
    with attach(case.model, partition, thresholds) as engine:
        assert_bounded(engine, case.losses, range(6))


@pytest.mark.parametrize(
    ("make_partition", "sizes"),
    [
        (flat, (1, 5)),
        (per_layer, (4, 2)),
        pytest.param(flat, (4, 2), marks=pytest.mark.slow),
        pytest.param(per_layer, (1,) * 6, marks=pytest.mark.slow),
    ],
)
def test_microbatches_accumulate(case, make_partition, sizes):
    thresholds, truth = truth_of(case.name, make_partition)
    with attach(case.model, make_partition(case.model), thresholds) as engine:
        for examples in torch.arange(6).split(sizes):
            clip(engine, case.losses, examples.tolist(), traced_on=range(6))
        assert engine.examples == 6
    assert_sums(case.model, truth.sums)
    assert torch.equal(engine.counts, truth.counts)
