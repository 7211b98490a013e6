"""Inner products and chunks: what saves time or memory must change no number."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from groupwise.clipping import attach, flat, gram, matmul, norm_terms, per_layer, shared_parameters
from groupwise.clipping.gram import self_products
from groupwise.clipping.precision import rounding_slack, sum_of_squares, upcast
from groupwise.clipping.rules import base
from groupwise.clipping.rules.base import chunk_floats, in_format_of, total_numel
from groupwise.clipping.rules.conv import Geometry, positions_first
from tests.clipping.conftest import BATCH, make_case
from tests.clipping.traced import clip, clip_batch


@pytest.mark.parametrize(
    ("library", "rows"), [("torch", 31), ("torch", 32), ("torch", 33), ("torch", 40), ("onednn", 255), ("onednn", 256)]
)
def test_a_symmetric_product_is_whole_and_its_quarter_is_not_computed_twice(monkeypatch, library, rows):
    monkeypatch.setattr(gram, "LEAST_SPLIT", 0)
    monkeypatch.setattr(matmul, "_used", library)
    x = torch.randn(3, rows, 7, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        found = self_products(x)
    torch.testing.assert_close(found, x @ x.mT, rtol=1e-12, atol=1e-12)
    half = rows // 2
    spared = half * (rows - half) if rows >= {"torch": 32, "onednn": 256}[library] else 0
    assert counter.get_total_flops() == 2 * 3 * 7 * (rows * rows - spared)


@pytest.mark.parametrize(("width", "split"), [(4096, True), (4095, False)])
def test_small_products_are_made_at_once(monkeypatch, width, split):
    monkeypatch.setattr(matmul, "_used", "torch")
    with FlopCounterMode(display=False) as counter:
        self_products(torch.zeros(1, 32, width))
    assert counter.get_total_flops() == 2 * width * 32 * 32 * (3 if split else 4) // 4


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "space"),
    [
        ((3,), (1,), (1,), (1,), (9,)),
        ((3,), (2,), (1,), (1,), (9,)),
        ((3, 2), (1, 2), (1, 0), (1, 1), (5, 6)),
        ((3, 2), (2, 1), (2, 1), (2, 1), (5, 4)),
        ((2, 2, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), (3, 2, 3)),
    ],
)
def test_inner_products_by_pixels_are_those_of_the_unfolded_input(kernel, stride, padding, dilation, space):
    geometry = Geometry(kernel, stride, padding, dilation, 1)
    x = torch.randn(2, 48, *space, dtype=torch.float64)
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    taps = 48 * math.prod(kernel)
    every = torch.eye(taps, dtype=x.dtype).view(taps, 48, *kernel)  # a filter for each number that a position sees
    unfolded = conv(x, every, None, stride, padding, dilation)
    found = geometry.products(x, unfolded.shape[2:])
    columns = unfolded.flatten(2)
    torch.testing.assert_close(found, columns.mT @ columns, rtol=1e-12, atol=1e-12)


CHUNKED = {
    "gram": (gram, "linear_3d", {"formula": "gram"}, 2 * 9),
    "tied, materialised": (shared_parameters, "tied_conv1d", {}, 2 * 48),
    "tied, one at a time": (shared_parameters, "tied_conv1d", {}, 1),
}


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_chunks_change_nothing(double, monkeypatch, name, make_partition):
    module, case_name, options, floats = CHUNKED[name]
    case = make_case(case_name)
    found = []
    for limit in (None, floats):
        if limit is not None:
            monkeypatch.setattr(module, "CHUNK_FLOATS", limit)
        case.model.zero_grad()
        with attach(case.model, make_partition(case.model), 0.3, **options) as engine:
            clip(engine, case.losses, range(BATCH))
            found.append([engine.per_example_norms, *(p.grad.clone() for p in case.model.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("floats", "sizes"), [(18, [2, 2, 1]), (17, [1] * 5), (10**6, [5])])
def test_inner_products_are_held_for_as_many_examples_as_the_chunk(monkeypatch, floats, sizes):
    monkeypatch.setattr(gram, "CHUNK_FLOATS", floats)
    seen, real = [], gram.GramTerms
    monkeypatch.setattr(gram, "GramTerms", lambda xx, *rest: seen.append(len(xx)) or real(xx, *rest))
    x, g = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 6, dtype=torch.float64)
    for bias in (True, False):
        seen.clear()
        squares = gram.gram_norms(x, g, bias)
        truth = (g.mT @ x).square().sum((1, 2)) + (g.sum(1).square().sum(1) if bias else 0)
        torch.testing.assert_close(squares, truth, rtol=1e-12, atol=0)
        assert seen == sizes


def test_how_far_rounding_may_have_gone():
    slack = rounding_slack(torch.tensor([2.0, 0.0]), 9)
    assert slack.tolist() == pytest.approx([2.0 * 4 * 3 * torch.finfo(torch.float32).eps, 0.0])


@pytest.mark.parametrize(("terms", "longest"), [((4, 5, 6), 6), ((7, 5, 6), 7), ((4, 8, 6), 8)])
def test_slack_is_for_the_longest_sum(monkeypatch, terms, longest):
    rows, d, p = terms
    seen = []
    real = norm_terms.slack_of
    monkeypatch.setattr(norm_terms, "slack_of", lambda n, *rest: seen.append(n) or real(n, *rest))
    x, g = torch.randn(2, rows, d), torch.randn(2, rows, p)
    gram.gram_norms(x, g, True)
    assert seen == [longest]


def test_slack_is_of_the_sizes_before_anything_cancels():
    """x and g of two positions that cancel exactly: ‖GᵀX‖ = 0, and its terms are not."""
    x, g = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]), torch.tensor([[[2.0], [-2.0]]])
    for bias, size in ((False, 2 * 5 * 2), (True, 2 * 26**0.5 * 2)):
        squares = gram.gram_norms(x, g, bias)
        assert squares.item() == pytest.approx(rounding_slack(torch.tensor(float(size) ** 2), 2).item(), rel=1e-5)


def test_small_helpers():
    assert total_numel(torch.zeros(2, 3), None, "x", torch.zeros(4)) == 10
    assert upcast(torch.zeros(1, dtype=torch.bfloat16)).dtype == upcast(torch.zeros(1).half()).dtype == torch.float32
    assert upcast(torch.zeros(1).double()).dtype == torch.float64
    squares = sum_of_squares((torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]]), None, torch.tensor([[2.0], [1.0]])))
    assert squares.tolist() == pytest.approx([9.0, 10.0], rel=1e-6)
    assert chunk_floats(torch.zeros(1)) == 2**20 and chunk_floats(torch.zeros(1, device="meta")) == 2**26


def test_chunks_on_a_gpu_grow_with_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=(index + 1) << 33)
    )
    base.device_memory.cache_clear()
    try:
        sizes = [chunk_floats(SimpleNamespace(device=torch.device("cuda", index))) for index in (0, 1, 9)]
    finally:
        base.device_memory.cache_clear()
    assert sizes == [2**25, 2**26, 10 * 2**25]


def test_memory_formats_follow_the_input():
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    plain = torch.randn(2, 3, 4, 5)
    assert in_format_of(last, plain).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(in_format_of(last, plain), plain)
    assert in_format_of(plain, last).is_contiguous() and torch.equal(in_format_of(plain, last), last)
    assert in_format_of(torch.randn(2, 3, 4).mT, torch.randn(2, 4, 3).mT).is_contiguous()
    both = torch.randn(2, 1, 4, 5)  # one channel: in both formats at once
    assert in_format_of(both, torch.randn(2, 1, 4, 5).mT.contiguous().mT).is_contiguous()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_positions_of_output_gradients(memory):
    g = torch.randn(2, 6, 3, 4).to(memory_format=memory)
    rows = positions_first(g)
    assert torch.equal(rows, g.flatten(2).mT)
    assert rows.data_ptr() == g.data_ptr(), "no copy"


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("width", [1, 2])
def test_features_of_one_number_are_no_positions(double, formula, width):
    """Inputs (B, T, 1) and outputs of one feature: axes of length 1 in every place."""
    layer = nn.Linear(width, 3 - width)
    x, g = torch.randn(4, 3, width), torch.randn(4, 3, 3 - width)
    for rows in (x, x[:, :1], x[:1]):
        weights = g[: len(rows), : rows.shape[1]]
        layer.zero_grad()
        with attach(layer, per_layer(layer), 1e-3, formula=formula) as engine:
            clip_batch(engine, lambda x, g: (layer(x) * g).sum((1, 2)), rows, weights)
            norms = engine.per_example_norms[0]
        each = weights.mT @ rows
        squares = each.square().sum((1, 2)) + weights.sum(1).square().sum(1)
        torch.testing.assert_close(norms, squares.sqrt(), rtol=1e-9, atol=0)
        torch.testing.assert_close(layer.weight.grad, (each * (1e-3 / norms)[:, None, None]).sum(0))


def test_a_layer_alone_keeps_no_more_than_it_must():
    """`save_memory` and `own_group` follow from the partition and the kind of norms."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    for partition, norms, alone, thrifty in (
        (flat(model), "bookkeeping", [False, False], False),
        (flat(model), "ghost", [False, False], True),
    ):
        with attach(model, partition, 1.0, norms=norms) as engine:
            every = [m.rule.methods for group in engine.groups for m in group.members]
            assert [c.own_group for c in every] == alone and [c.save_memory for c in every] == [thrifty] * 2
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with attach(model, per_layer(model), 1.0) as engine:
        assert all(m.rule.methods.own_group for group in engine.groups for m in group.members)
