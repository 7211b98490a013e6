"""Per-example gradients of convolutions: those of single examples, whatever the shape and the device."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.rules import conv, find_rule
from groupwise.clipping.rules.base import LayerRule, RuleContext, Saved
from tests.clipping.rule_norms import squares_of

LAYERS = {
    "padded": (lambda: nn.Conv2d(4, 5, 3, padding=1), (6, 5)),
    "not padded": (lambda: nn.Conv2d(4, 5, 3), (6, 5)),
    "strides": (lambda: nn.Conv2d(4, 5, 3, stride=(2, 1), padding=1), (6, 7)),
    "a stride that leaves inputs unseen": (lambda: nn.Conv2d(4, 5, 2, stride=3), (7, 7)),
    "dilated": (lambda: nn.Conv2d(4, 5, 3, padding=2, dilation=2), (6, 7)),
    "taps that see nothing": (lambda: nn.Conv2d(4, 5, 5, padding=4, dilation=(3, 1)), (5, 3)),
    "more padding than input": (lambda: nn.Conv2d(6, 5, (4, 2), padding=(3, 1)), (1, 4)),
    "groups": (lambda: nn.Conv2d(8, 6, 3, padding=1, groups=2), (6, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (6, 5)),
    "reflected": (lambda: nn.Conv2d(4, 5, 3, padding=1, padding_mode="reflect"), (6, 5)),
    "same": (lambda: nn.Conv2d(4, 5, (2, 3), padding="same", dilation=2), (6, 5)),
    "one tap": (lambda: nn.Conv2d(4, 5, 1), (6, 5)),
    "one axis": (lambda: nn.Conv1d(4, 5, 4, stride=2, padding=2), (9,)),
    "three axes": (lambda: nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1), (4, 3, 2)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, padding=1), (4, 5)),
    "transposed, output padding": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=(1, 0), dilation=2),
        (4, 5),
    ),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5)),
    "transposed, one axis": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=3, output_padding=2), (4,)),
    "transposed, three axes": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, output_padding=1), (2, 3, 2)),
}


class Call(SimpleNamespace):
    """A layer's rule, what its forward pass saved, its output gradients, and single examples' gradients."""

    rule: LayerRule
    saved: Saved
    g: Tensor
    weights: Tensor
    biases: Tensor


def call_of(name: str, memory: torch.memory_format = torch.contiguous_format) -> Call:
    make, space = LAYERS[name]
    layer = make()
    x = torch.randn(5, layer.in_channels, *space)
    x = x.to(memory_format=memory) if x.dim() == 4 else x
    rule = find_rule(layer)(layer)
    y, saved = rule.forward(rule.prepare(x), layer.weight.detach(), layer.bias.detach())
    g = rule.arrange(saved, torch.randn_like(y))
    singles = [torch.autograd.grad((layer(x[[i]]) * g[[i]]).sum(), [layer.weight, layer.bias]) for i in range(5)]
    weights, biases = (torch.stack(rows) for rows in zip(*singles, strict=True))
    return Call(rule=rule, saved=saved, g=g, weights=weights, biases=biases)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_single_examples(name, memory, double):
    call = call_of(name, memory)
    found, bias = call.rule.per_example_gradients(call.saved, call.g, (True, True))
    torch.testing.assert_close(found, call.weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias, call.biases, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "depthwise" and not name.endswith("groups")])
def test_unfolded_windows_as_on_a_gpu_give_the_same(name, memory, double):
    call = call_of(name, memory)
    x, rows = call.rule.sides(call.saved, call.g)
    windows = call.rule.geometry.windows(x, rows.shape[2:])
    found = torch.bmm(rows.flatten(2), windows.mT).view_as(call.weights)
    torch.testing.assert_close(found, call.weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ["gram", "materialize"])
def test_norms_are_those_of_single_examples(name, method, double):
    call = call_of(name)
    squares = call.weights.flatten(1).square().sum(1)
    for wanted in ((True, False), (True, True)):
        expected = squares + wanted[1] * call.biases.square().sum(1)
        context = RuleContext(methods=NormMethods(method))
        found = squares_of(call.rule, call.saved, call.g, wanted, context)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["gram", "materialize"])
@pytest.mark.parametrize(("few", "sizes"), [(2, [2, 2, 1]), (1, [1] * 5), (100, [5])])
def test_norms_are_found_for_a_few_examples_at_a_time(monkeypatch, few, sizes, method, double):
    call = call_of("padded")
    rule, seen, context = call.rule, [], RuleContext(methods=NormMethods(method))
    whole = squares_of(rule, call.saved, call.g, (True, True), context)
    if method == "gram":
        held = 30**2 + (1 + 6) * (6 * 5) ** 2 * 2 + 3 * 30**2
        monkeypatch.setattr(conv, "chunk_floats", lambda g: few * held)
        real = conv.norms_from_products
        monkeypatch.setattr(conv, "norms_from_products", lambda xx, *rest: seen.append(len(xx)) or real(xx, *rest))
    else:
        monkeypatch.setattr(conv, "GROUPED_FLOATS", few * (4 * 5 * 9 + 5))
        real = type(rule)._by_groups
        monkeypatch.setattr(type(rule), "_by_groups", lambda self, x, g: seen.append(len(x)) or real(self, x, g))
    torch.testing.assert_close(squares_of(rule, call.saved, call.g, (True, True), context), whole)
    assert seen == sizes


@pytest.mark.parametrize("wanted", [(True, True), (True, False)])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "depthwise" and not name.endswith("groups")])
def test_sums_of_many_weights_at_few_positions_are_those_of_single_examples(name, memory, wanted, monkeypatch, double):
    monkeypatch.setattr(conv, "FEW_ROWS", 1000)
    monkeypatch.setattr(conv, "MANY_WEIGHTS", 1)
    call, factors = call_of(name, memory), torch.tensor([0.5, 0.0, 1.0, 0.25, 0.125])
    sums = call.rule.weighted_sum(call.saved, call.g, factors, wanted, RuleContext())
    for found, rows, asked in zip(sums, (call.weights, call.biases), wanted, strict=True):
        if asked:
            torch.testing.assert_close(found, torch.einsum("n,n...->...", factors, rows), rtol=1e-12, atol=1e-12)
        else:
            assert found is None
