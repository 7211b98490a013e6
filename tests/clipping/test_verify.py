"""The check before training passes for a sound model and names what is wrong with an unsound one."""

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, per_layer
from groupwise.clipping.rules import LayerRule
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.verify import verify
from groupwise.errors import UserError


class MixesExamples(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def attached(*layers: nn.Module):
    model = nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 2))
    x = torch.randn(8, 4)
    return attach(model, per_layer(model), 0.05), lambda examples: model(x[list(examples)]).square().sum(1)


def test_a_sound_model_passes_and_nothing_changes():
    engine, losses_of = attached(nn.Dropout(0.5), nn.Tanh())
    assert verify(engine, losses_of, [0, 3, 5]) < 1e-4
    assert engine.examples == 0 and float(engine.counts.sum()) == 0
    assert engine.model.training and all(p.grad is None for p in engine.model.parameters())


def test_mixing_of_examples_is_found():
    engine, losses_of = attached(MixesExamples())
    with pytest.raises(UserError, match="mixes the examples"):
        verify(engine, losses_of, [0, 3, 5])


def test_a_wrong_rule_is_found(monkeypatch):
    def half(self, saved, g, wanted):
        return LayerRule.squared_norms(self, saved, g, wanted) / 4

    monkeypatch.setattr(LinearRule, "squared_norms", half)
    engine, losses_of = attached(nn.Tanh())
    with pytest.raises(UserError, match=r"clipped sum of parameter '0.weight' is off"):
        verify(engine, losses_of, [0, 3, 5])
