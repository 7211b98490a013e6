"""Convolutions: sums and norms match a loop over examples, for every shape, layout and weight-gradient method."""

from itertools import product

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, per_layer
from groupwise.clipping.rules import conv
from tests.clipping.alone import assert_exact
from tests.clipping.conftest import BATCH, CASES, make_case

METHODS = {
    "by groups of channels": {},
    "by windows, as on a GPU": {
        "_by_groups": lambda rule, x, g: (g.flatten(2) @ rule.windows(x, g.shape[2:]).mT).view(
            len(x), -1, *rule._filter()
        )
    },
    "many weights at few positions": {"FEW_ROWS": 1000, "MANY_WEIGHTS": 1},
}
"""How the gradients of a weight are computed, and what is patched for it in the module or the rule."""


@pytest.mark.parametrize(
    ("name", "method", "memory", "formula"),
    [
        cell
        for name in CASES
        if name.startswith("conv")
        for cell in product([name], METHODS, [torch.contiguous_format, torch.channels_last], ["gram", "materialize"])
        if cell[1] == "by groups of channels" or not ("grouped" in name or "depthwise" in name)
    ],
)
def test_sums_and_norms_match_a_loop_over_examples(name, method, memory, formula, monkeypatch, double):
    for attribute, value in METHODS[method].items():
        monkeypatch.setattr(conv if attribute.isupper() else conv.ConvRule, attribute, value)
    case = make_case(name)
    if case.inputs.dim() == 4:
        case.inputs = case.inputs.to(memory_format=memory)
    with attach(case.model, per_layer(case.model), 1.0, formula=formula) as engine:
        assert_exact(engine, case.losses, range(BATCH))


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize(("few", "sizes"), [(2, [2, 2, 1]), (1, [1] * 5), (100, [5])])
def test_norms_are_computed_in_chunks_of_examples(monkeypatch, few, sizes, formula, double):
    counts = []
    if formula == "gram":
        held = 30**2 + (1 + 6) * (6 * 5) ** 2 * 2 + 3 * 30**2
        monkeypatch.setattr(conv, "chunk_floats", lambda g: few * held)
        real = conv.norms_from_products
        monkeypatch.setattr(conv, "norms_from_products", lambda xx, *rest: counts.append(len(xx)) or real(xx, *rest))
    else:
        monkeypatch.setattr(conv, "GROUPED_FLOATS", few * (4 * 5 * 9 + 5))
        real = conv.ConvRule._by_groups
        monkeypatch.setattr(conv.ConvRule, "_by_groups", lambda self, x, g: counts.append(len(x)) or real(self, x, g))
    layer, x = nn.Conv2d(4, 5, 3, padding=1), torch.randn(5, 4, 6, 5)
    with attach(layer, per_layer(layer), 1.0, formula=formula) as engine:
        assert_exact(engine, lambda rows: layer(x[list(rows)]).flatten(1).square().sum(1), range(5))
    assert counts == sizes
