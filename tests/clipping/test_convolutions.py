"""Convolutions: sums and norms are those of single examples, whatever the shape and the device."""

from itertools import product

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, per_layer
from groupwise.clipping.rules import conv
from tests.clipping.alone import assert_exact
from tests.clipping.conftest import BATCH, CASES, make_case

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


@pytest.mark.parametrize(
    ("name", "way", "memory", "formula"),
    [
        cell
        for name in CASES
        if name.startswith("conv")
        for cell in product([name], WAYS, [torch.contiguous_format, torch.channels_last], ["gram", "materialize"])
        if cell[1] == "by groups of channels" or not ("grouped" in name or "depthwise" in name)
    ],
)
def test_sums_and_norms_are_those_of_single_examples(name, way, memory, formula, monkeypatch, double):
    for what, value in WAYS[way].items():
        monkeypatch.setattr(conv if what.isupper() else conv.ConvRule, what, value)
    case = make_case(name)
    if case.inputs.dim() == 4:
        case.inputs = case.inputs.to(memory_format=memory)
    with attach(case.model, per_layer(case.model), 1.0, formula=formula) as engine:
        assert_exact(engine, case.losses, range(BATCH))


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
    layer, x = nn.Conv2d(4, 5, 3, padding=1), torch.randn(5, 4, 6, 5)
    with attach(layer, per_layer(layer), 1.0, formula=formula) as engine:
        assert_exact(engine, lambda rows: layer(x[list(rows)]).flatten(1).square().sum(1), range(5))
    assert seen == sizes
