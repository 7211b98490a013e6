"""Convolutions: sums and norms are those of single examples, whatever the shape and the device."""

from itertools import product

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, per_layer
from groupwise.clipping.rules import conv
from tests.clipping.alone import assert_exact

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


WAYS = {
    "by groups of channels": {},
    "by windows, as on a GPU": {
        "_by_groups": lambda rule, x, g: (g.flatten(2) @ rule.geometry.windows(x, g.shape[2:]).mT).view(
            len(x), -1, *rule._filter()
        )
    },
    "many weights at few positions": {"FEW_ROWS": 1000, "MANY_WEIGHTS": 1},
}
"""How a weight's gradients are made, and what is replaced for that, in the file or in the rule."""


def made(name: str, memory: torch.memory_format = torch.contiguous_format):
    """A layer, and losses of five examples by their numbers."""
    make, space = LAYERS[name]
    layer = make()
    x = torch.randn(5, layer.in_channels, *space)
    x = x.to(memory_format=memory) if x.dim() == 4 else x
    return layer, lambda rows: layer(x[list(rows)]).flatten(1).square().sum(1)


@pytest.mark.parametrize(
    ("name", "way", "memory", "formula"),
    [
        cell
        for cell in product(LAYERS, WAYS, [torch.contiguous_format, torch.channels_last], ["gram", "materialize"])
        if cell[1] == "by groups of channels" or not (cell[0] == "depthwise" or cell[0].endswith("groups"))
    ],
)
def test_sums_and_norms_are_those_of_single_examples(name, way, memory, formula, monkeypatch, double):
    for what, value in WAYS[way].items():
        monkeypatch.setattr(conv if what.isupper() else conv.ConvRule, what, value)
    layer, losses_of = made(name, memory)
    with attach(layer, per_layer(layer), 1.0, formula=formula) as engine:
        assert_exact(engine, losses_of, range(5))


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize(("few", "sizes"), [(2, [2, 2, 1]), (1, [1] * 5), (100, [5])])
def test_norms_are_found_for_a_few_examples_at_a_time(monkeypatch, few, sizes, formula, double):
    seen = []
    if formula == "gram":
        held = 30**2 + (1 + 6) * (6 * 5) ** 2 * 2 + 3 * 30**2
        monkeypatch.setattr(conv, "chunk_floats", lambda g: few * held)
        real = conv.norms_from_products
        monkeypatch.setattr(conv, "norms_from_products", lambda xx, *rest: seen.append(len(xx)) or real(xx, *rest))
    else:
        monkeypatch.setattr(conv, "GROUPED_FLOATS", few * (4 * 5 * 9 + 5))
        real = conv.ConvRule._by_groups
        monkeypatch.setattr(conv.ConvRule, "_by_groups", lambda self, x, g: seen.append(len(x)) or real(self, x, g))
    layer, losses_of = made("padded")
    with attach(layer, per_layer(layer), 1.0, formula=formula) as engine:
        assert_exact(engine, losses_of, range(5))
    assert seen == sizes
