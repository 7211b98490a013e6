"""The check before training passes for a sound model and names what is wrong with an unsound one."""

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, automatic_factors, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.clipping.rules import LayerRule
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.verify import _check_independence, _check_sums, verify
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


@pytest.mark.parametrize(("error", "refused"), [(0.04, False), (0.06, True)])
def test_a_clipped_sum_may_be_off_by_a_twentieth(monkeypatch, error, refused):
    real = LinearRule.weighted_sum

    def off(self, *args):
        weight, bias = real(self, *args)
        return weight * (1 + error), bias

    monkeypatch.setattr(LinearRule, "weighted_sum", off)
    model, x = nn.Linear(4, 3, bias=False), torch.randn(8, 4)
    with attach(model, per_layer(model), 0.05) as engine:
        if refused:  # one example's clipped sum has the threshold as its norm
            with pytest.raises(UserError, match="is off by 6"):
                verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [3])
        else:
            found = verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [3])
            assert found == pytest.approx(error, rel=1e-3)


def test_an_error_is_relative_to_what_the_group_keeps():
    """Of gradients within the threshold the norm is the scale, of longer ones the threshold."""
    for threshold in (1e-3, 1e3):
        model, x = nn.Linear(4, 3), torch.randn(2, 4)
        with attach(model, per_layer(model), threshold) as engine:
            with engine.bypassed():
                truth = clipped_sums(
                    model, lambda i, m=model, x=x: m(x[[i]]).square().sum(), range(2), engine.partition, [threshold]
                )
            kept = float(truth.norms.clamp_max(threshold).sum())
            for p, s in zip(model.parameters(), truth.sums.values(), strict=True):
                p.grad = s.clone()
            model.bias.grad[0] += 0.03 * kept
            assert _check_sums(engine, truth, 0.05) == pytest.approx(0.03, rel=1e-3)
            with pytest.raises(UserError, match="'bias' is off by 3"):
                _check_sums(engine, truth, 0.02)


@pytest.mark.parametrize(
    ("alone", "together", "refused"),
    [(0.5, 0.5009, False), (0.5, 0.5011, True), (50.0, 50.049, False), (50.0, 50.051, True), (50.0, 49.94, True)],
)
def test_a_loss_may_move_by_a_thousandth_among_others(alone, together, refused):
    engine, losses_of = attached(nn.Tanh())

    def losses(examples):
        return losses_of(examples) * 0 + (alone if len(examples) == 1 else together)

    if refused:
        with pytest.raises(UserError, match="Example 0 has loss"):
            _check_independence(engine, losses, [0, 3], 1e-3)
        with pytest.raises(UserError, match="Example 0 has loss"):
            verify(engine, losses, [0, 3])
    else:
        _check_independence(engine, losses, [0, 3], 1e-3)


def test_one_loss_for_all_is_found():
    engine, losses_of = attached(nn.Tanh())
    with pytest.raises(UserError, match="2 examples gave shape"):
        verify(engine, lambda examples: losses_of(examples).mean(), [0, 3])


def test_gradients_and_modes_are_put_back_whatever_happens():
    engine, losses_of = attached(nn.Dropout(0.5), nn.Tanh())
    engine.model[1].eval()
    before = [torch.ones_like(p) for p in engine.model.parameters()]
    for parameter, gradient in zip(engine.model.parameters(), before, strict=True):
        parameter.grad = gradient
    verify(engine, losses_of, [0, 3])
    with pytest.raises(UserError):
        verify(engine, lambda examples: losses_of(examples).mean(), [0, 3])
    assert engine.model.training and not engine.model[1].training and engine.model[2].training
    for parameter, gradient in zip(engine.model.parameters(), before, strict=True):
        assert parameter.grad is gradient and bool((gradient == 1).all())


def test_other_clip_rules_are_compared_with_themselves():
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    with attach(model, per_layer(model), 0.05, clip_rule=automatic_factors(0.5)) as engine:
        assert verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [0, 1, 2]) < 1e-4
