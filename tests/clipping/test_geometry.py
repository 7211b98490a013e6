"""Gradients of convolutions without unfolding the first axis: the same numbers, from less memory."""

import itertools
import math

import pytest
import torch
from torch import nn

from groupwise.clipping import Rates
from groupwise.clipping.cost_model import Choices
from groupwise.clipping.rules import find_rule
from groupwise.clipping.rules import geometry as geometries
from groupwise.clipping.rules.base import BufferPool, RuleContext
from groupwise.clipping.rules.geometry import Geometry, Span

EVEN = Rates(matmul=1e10, gram=1e10, outer=1e10, kernel=1e10, bytes=1e10, calls=1e6)
UNFOLDED = {"stride of the first axis", "one tap", "narrow"}
LAYERS = {
    "padded": (lambda: nn.Conv2d(4, 5, 3, padding=1), (6, 5)),
    "not padded": (lambda: nn.Conv2d(4, 5, 3), (6, 5)),
    "dilated": (lambda: nn.Conv2d(4, 5, 3, padding=2, dilation=2), (6, 7)),
    "taps that see nothing": (lambda: nn.Conv2d(4, 5, 5, padding=4, dilation=(3, 1)), (5, 3)),
    "more padding than input": (lambda: nn.Conv2d(6, 5, (4, 2), padding=(3, 1)), (1, 4)),
    "stride of the second axis": (lambda: nn.Conv2d(4, 5, 3, stride=(1, 2), padding=1), (6, 7)),
    "groups": (lambda: nn.Conv2d(8, 6, 3, padding=1, groups=2), (6, 5)),
    "reflected": (lambda: nn.Conv2d(4, 5, 3, padding=1, padding_mode="reflect"), (6, 5)),
    "one axis": (lambda: nn.Conv1d(12, 5, 4, padding=2), (9,)),
    "three axes": (lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=1), (4, 3, 2)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, padding=1), (4, 5)),
    "stride of the first axis": (lambda: nn.Conv2d(4, 5, 3, stride=(2, 1), padding=1), (6, 7)),
    "one tap": (lambda: nn.Conv2d(4, 5, (1, 3)), (6, 5)),
    "narrow": (lambda: nn.Conv2d(3, 5, 3), (6, 5)),
}


@pytest.mark.parametrize("floats", [1 << 20, 300])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_single_examples(name, memory, floats, double, monkeypatch):
    monkeypatch.setattr("groupwise.clipping.rules.conv.chunk_floats", lambda g: floats)
    make, space = LAYERS[name]
    layer = make()
    x = torch.randn(5, layer.in_channels, *space)
    if x.dim() == 4:
        x = x.to(memory_format=memory)
    rule, context = find_rule(layer)(layer), RuleContext(choices=Choices("materialize", EVEN))
    y, saved = rule.forward(rule.prepare(x), layer.weight.detach(), layer.bias.detach())
    g = rule.arrange(saved, torch.randn_like(y))
    assert rule._geometry.slides(rule._channels()) == (name not in UNFOLDED)
    expected = [
        torch.autograd.grad((layer(x[[i]]) * g[[i]]).sum(), [layer.weight, layer.bias], allow_unused=True)
        for i in range(5)
    ]
    weights, biases = (torch.stack(rows) for rows in zip(*expected, strict=True))
    found, bias = rule.per_example_gradients(saved, g, (True, True))
    torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias, biases, rtol=1e-12, atol=1e-12)
    squares = weights.flatten(1).square().sum(1)
    torch.testing.assert_close(rule.squared_norms(saved, g, (True, False), context), squares, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "size"),
    list(itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 4), (1, 2, 3), (1, 4, 7))),
)
def test_spans_are_the_taps_that_fall_on_the_input(kernel, stride, padding, dilation, size):
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if out < 1:
        return
    geometry = Geometry((kernel,), (stride,), (padding,), (dilation,), 1)
    for tap, span in enumerate(geometry.spans(0, size, out)):
        seen = [(t, t * stride + tap * dilation - padding) for t in range(out)]
        inside = [(t, pixel) for t, pixel in seen if 0 <= pixel < size]
        assert [(span.first + i, span.seen + i * stride) for i in range(len(span))] == inside


def test_only_the_other_axes_are_copied_for_each_tap(monkeypatch):
    """3×3 over 8 channels: 24 numbers a position in the place of 72, and three products in the place of one."""
    layer = nn.Conv2d(8, 5, 3, padding=1)
    rule, context = find_rule(layer)(layer), RuleContext(choices=Choices("materialize", EVEN))
    y, saved = rule.forward(torch.randn(2, 8, 6, 7), layer.weight.detach(), None)
    taken, products = [], []
    take, bmm = BufferPool.take, torch.bmm

    def spy(self, purpose, like, *shape):
        taken.append((purpose, math.prod(shape)))
        return take(self, purpose, like, *shape)

    monkeypatch.setattr(BufferPool, "take", spy)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: products.append(tuple(b.shape)) or bmm(a, b, out=out))
    for least, written, shapes in (
        (0, 2 * 6 * 7 * 24, [(2, 35, 24), (2, 42, 24), (2, 35, 24)]),
        (25, 2 * 6 * 7 * 72, [(2, 42, 72)]),
    ):
        monkeypatch.setattr(geometries, "LEAST_WIDTH", least)
        taken.clear()
        products.clear()
        rule.squared_norms(saved, torch.randn_like(y), (True, False), context)
        assert dict(taken)["columns"] == written and products == shapes


def test_a_span_that_sees_nothing_is_empty():
    first, *_ = Geometry((4,), (1,), (3,), (1,), 1).spans(0, 1, 4)
    assert first == Span(3, 4, 0)
    empty = Geometry((1,), (1,), (3,), (1,), 1).spans(0, 1, 2)[0]
    assert not empty and len(empty) == 0
