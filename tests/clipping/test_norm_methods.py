"""The method by which a layer computes its norms: how it is chosen, forced and explained."""

import dataclasses

import pytest
import torch
from torch import nn

from groupwise.clipping import Rates, WSConv2d, attach, explain, flat, per_layer
from groupwise.errors import UserError
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip_batch
from tests.tapes import Tape

EVEN = Rates(product=1e10, gram=1e10, outer=1e10, bytes=1e10, starts=1e300)


def chosen(model: nn.Module, x: torch.Tensor, **options) -> list[str]:
    """The method of each layer, in order, "one" if there is no choice."""
    with attach(model, per_layer(model), 0.1, **options) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).square().sum(1), x)
        methods_of_layers = [member.rule.methods for group in engine.groups for member in group.members]
        return [methods.chosen[methods.last] if methods.last else "one" for methods in methods_of_layers]


@pytest.mark.parametrize(("length", "method"), [(4, "gram"), (500, "materialize"), (1, "one")])
def test_short_sequences_use_gram_and_long_ones_materialize(length, method):
    assert chosen(nn.Linear(64, 64), torch.randn(16, length, 64)) == [method]


def test_memory_traffic_counts_in_the_choice():
    sizes = (nn.Linear(300, 300), torch.randn(2, 100, 300))  # gradients win if only operations count
    assert chosen(*sizes, rates=dataclasses.replace(EVEN, bytes=1e13)) == ["materialize"]
    assert chosen(*sizes, rates=dataclasses.replace(EVEN, bytes=1e8)) == ["gram"]


@pytest.mark.parametrize("formula", ["gram", "materialize"])
def test_a_forced_formula_is_always_used(formula):
    for x in (torch.randn(2, 4, 64), torch.randn(2, 500, 64)):
        assert chosen(nn.Linear(64, 64), x, formula=formula) == [formula]


def test_an_unknown_formula_is_refused():
    with pytest.raises(UserError, match="formula='fast' is unknown"):
        attach(nn.Linear(2, 2), flat(nn.Linear(2, 2)), 1.0, formula="fast")


def test_explain_lists_the_chosen_method_first():
    model = nn.Linear(4, 4)
    for formula in ("auto", "materialize"):
        with attach(model, per_layer(model), 1.0, formula=formula) as engine:
            clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(3, 5, 4))
            methods = engine.groups[0].members[0].rule.methods
            lines = explain(engine).splitlines()
        taken, costs = methods.chosen[methods.last], methods.costs[methods.last]
        other = next(name for name in costs if name != taken)
        head = ("layer", "type", "input -> output", "norms by")
        row = ("(model)", "Linear", "3×5×4 -> 3×5×4", taken)
        widths = tuple(max(len(a), len(b)) for a, b in zip(head, row, strict=True))
        for line, cells in ((lines[0], head), (lines[1], row)):
            assert line.startswith("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + "  ")
        costs_of = [f"{name} {1e6 * costs[name]:.1f} µs an example" for name in (taken, other)]
        assert lines[1].endswith("  " + ", ".join(costs_of))
        assert not lines[2:]


def test_explain_marks_layers_without_a_choice():
    model = nn.Sequential(nn.LayerNorm(4))
    with attach(model, per_layer(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(3, 5, 4))
        lines = explain(engine).splitlines()
    assert lines[1] == f"0      LayerNorm  {'':15}  one method  no choice"


@pytest.mark.parametrize("mode", FEW)
def test_backward_does_not_synchronise_on_a_gpu(mode, monkeypatch):
    monkeypatch.setattr("groupwise.clipping.factors.is_async_device", lambda t: True)
    model = nn.Sequential(
        nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm(6), nn.Unflatten(2, (6, 1)), nn.Flatten(2), nn.Linear(6, 6),
        nn.Unflatten(1, (2, 2)), nn.Flatten(2), nn.Unflatten(2, (3, 4)), WSConv2d(2, 4, 3, padding=1, gain=True),
        nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(24, 2),
    )  # fmt: skip
    with attached(model, mode, 0.1) as engine:
        ids = torch.randint(0, 7, (3, 4))
        clip_batch(engine, lambda ids: model(ids).square().sum(1), ids)  # only the first pass walks the graph
        with Tape():
            with engine.forward(3):
                losses = model(ids).square().sum(1)
            engine.backward(losses)
