"""Every mode × every layer rule equals a float64 loop over single examples, to 1e-9 relative."""

from functools import cache

import pytest
import torch

from groupwise.clipping import attach, automatic_factors, by_mapping, clip_factors, flat, per_block, per_layer
from groupwise.clipping.reference import Reference, clipped_sums
from tests.clipping.conftest import CASES, make_case

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")
RTOL = 1e-9

MODES = {
    "flat": (flat, {}),
    "ghost": (flat, {"norms": "ghost"}),
    "layer": (per_layer, {}),
    "block": (per_block, {}),
    "layer_gram": (per_layer, {"formula": "gram"}),
    "layer_materialized": (per_layer, {"formula": "materialize"}),
    "flat_gram": (flat, {"formula": "gram"}),
    "flat_materialized": (flat, {"formula": "materialize"}),
    "layer_automatic": (per_layer, {"clip_rule": automatic_factors(0.01)}),
}


@cache
def different(name: str) -> list[str]:
    """The modes that are not another one of these for this case: where all blocks are layers, say, or all is one."""
    model, found = CASES[name][0](), {}
    for mode, (make_partition, options) in MODES.items():
        found.setdefault((tuple(group.layers for group in make_partition(model)), str(options)), mode)
    return list(found.values())


def each_case_in(*modes: str) -> pytest.MarkDecorator:
    """Every layer type and awkward use, in those of `modes` that differ for it."""
    pairs = [(name, mode) for name in CASES for mode in different(name) if mode in modes]
    return pytest.mark.parametrize(("case", "mode"), pairs, indirect=["case"], ids="-".join)


def middle_thresholds(case, partition) -> list[float]:
    """Thresholds that clip some examples and leave others: the median norm of each group."""
    norms = clipped_sums(case.model, case.loss_of, range(6), partition, [1.0] * len(partition)).norms
    return [max(float(row.median()), 1e-3) for row in norms]


@cache
def truth_of(name, make_partition, rule=clip_factors) -> tuple[list[float], Reference]:
    """Thresholds in the middle of a case's norms, and the loop at them: once for all modes that share it."""
    torch.manual_seed(0)  # the very weights and inputs that the fixture gives each test
    case = make_case(name)
    partition = make_partition(case.model)
    thresholds = middle_thresholds(case, partition)
    return thresholds, clipped_sums(case.model, case.loss_of, range(6), partition, thresholds, rule)


def assert_equal_to_reference(case, partition, thresholds, truth, **options) -> None:
    with attach(case.model, partition, thresholds, **options) as engine:
        engine.backward(case.losses())
        for name, parameter in case.model.named_parameters():
            if parameter.requires_grad:
                expected = truth.sums[name]
                error = float((parameter.grad - expected).norm())
                assert error <= RTOL * float(expected.norm()) + 1e-12, (name, error, float(expected.norm()))
            else:
                assert parameter.grad is None
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-9)
        counted_near = ((truth.norms / torch.tensor(thresholds)[:, None] - 1).abs() < 1e-9).sum(1)
        assert bool(((engine.counts - truth.counts).abs() <= counted_near).all())


@each_case_in(*MODES)
def test_clipped_sums_norms_and_counts(case, mode):
    make_partition, options = MODES[mode]
    thresholds, truth = truth_of(case.name, make_partition, options.get("clip_rule", clip_factors))
    assert_equal_to_reference(case, make_partition(case.model), thresholds, truth, **options)


def test_any_mapping(build):
    case = build("conv2d")
    partition = by_mapping(case.model, {"0": "first", "*": "rest"})
    assert [group.layers for group in partition] == [("0",), ("2",)]
    thresholds = middle_thresholds(case, partition)
    truth = clipped_sums(case.model, case.loss_of, range(6), partition, thresholds)
    assert_equal_to_reference(case, partition, thresholds, truth)


def test_one_group_a_layer_equals_flat_for_a_single_layer(build):
    case = build("linear_3d")
    results = []
    for partition in (flat(case.model), per_layer(case.model)):
        case.model.zero_grad()
        with attach(case.model, partition, 0.5) as engine:
            engine.backward(case.losses())
        results.append(case.model.weight.grad.clone())
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_infinite_thresholds_are_plain_sgd(case):
    case.losses().sum().backward()
    plain = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    for norms, partition in (("bookkeeping", per_layer(case.model)), ("ghost", flat(case.model))):
        case.model.zero_grad()
        with attach(case.model, partition, 1e30, norms=norms) as engine:
            engine.backward(case.losses())
        for name, expected in plain.items():
            got = case.model.get_parameter(name).grad
            assert float((got - expected).norm()) <= RTOL * float(expected.norm()) + 1e-12, name


def test_no_example_exceeds_its_threshold(case):
    """The sensitivity itself: one example alone moves group k by at most C_k."""
    partition = per_layer(case.model)
    thresholds = [0.5 * c for c in truth_of(case.name, per_layer)[0]]
    with attach(case.model, partition, thresholds) as engine:
        for example in range(6):
            case.model.zero_grad()
            engine.backward(case.losses([example]))
            for group, threshold in zip(engine.groups, thresholds, strict=True):
                norm = torch.stack([p.grad.square().sum() for p in group.parameters]).sum().sqrt()
                assert float(norm) <= threshold * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make_partition", "microbatch"),
    [
        (flat, 1),
        (per_layer, 4),
        pytest.param(flat, 4, marks=pytest.mark.slow),
        pytest.param(per_layer, 1, marks=pytest.mark.slow),
    ],
)
def test_microbatches_accumulate(case, make_partition, microbatch):
    partition = make_partition(case.model)
    thresholds, _ = truth_of(case.name, make_partition)
    results = []
    for size in (6, microbatch):
        case.model.zero_grad()
        with attach(case.model, partition, thresholds) as engine:
            for start in range(0, 6, size):
                engine.backward(case.losses(list(range(start, min(6, start + size)))))
            assert engine.examples == 6
            results.append(
                ({n: p.grad.clone() for n, p in case.model.named_parameters() if p.requires_grad}, engine.counts)
            )
    (whole, counts), (parts, part_counts) = results
    for name, expected in whole.items():
        assert float((parts[name] - expected).norm()) <= RTOL * float(expected.norm()) + 1e-12
    near_median = 1  # the example at the median itself may round either way
    assert bool(((counts - part_counts).abs() <= near_median).all())
