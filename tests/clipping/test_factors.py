"""Clip rules: factor · norm never exceeds the threshold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from groupwise.clipping import attach, automatic_factors, clip_factors, flat
from groupwise.clipping.factors import CLIP_RULES, is_async_device, keep_finite
from groupwise.config.keys import CHOICES
from groupwise.errors import UserError

positive = st.floats(1e-20, 1e20)


@pytest.mark.parametrize("name", CLIP_RULES)
@given(st.lists(st.floats(0, 1e20), min_size=1), positive, st.sampled_from([1e-4, 0.01, 1.0]))
def test_the_clipped_norm_is_at_most_the_threshold(name, norms, threshold, gamma):
    norms = torch.tensor(norms, dtype=torch.float64)
    clipped = norms * CLIP_RULES[name](gamma)(norms, torch.tensor(threshold, dtype=torch.float64))
    assert bool((clipped <= threshold * (1 + 1e-12)).all())


def between(norms, threshold):
    return clip_factors(norms, threshold) * norms / norms.amax(1, keepdim=True)


RULES = [lambda norms, at: 1.1 * at / norms, lambda norms, at: -clip_factors(norms, at), between]


@pytest.mark.parametrize("rule", RULES, ids=["too large", "negative", "depends on other norms"])
def test_a_rule_without_a_bound_is_refused(rule):
    with pytest.raises(UserError, match="a factor between 0 and threshold / norm for each norm, whatever the other"):
        attach(nn.Linear(1, 1), flat(nn.Linear(1, 1)), 1.0, clip_rule=rule)


def test_the_configuration_offers_exactly_the_known_rules():
    assert tuple(CLIP_RULES) == CHOICES["clip.rule"]


def test_norms_within_the_bound_get_factor_one():
    assert clip_factors(torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor(1.0)).tolist() == [1.0, 1.0, 1.0, 0.5]


def test_infinite_and_nan_squared_norms_are_left_out():
    squares = torch.tensor([-math.inf, math.inf, math.nan, -1e-3, 0.0, 2.0], dtype=torch.float64)
    assert keep_finite(torch.ones(6), squares).tolist() == [0, 0, 0, 1, 1, 1]
    layer = nn.Linear(1, 1)
    engine = attach(layer, flat(layer), 1.0)
    engine.count_norms(squares.unsqueeze(0))
    assert engine.nonfinite == 3


def test_only_devices_other_than_the_cpu_are_async():
    assert not is_async_device(torch.zeros(1)) and is_async_device(torch.zeros(1, device="meta"))


def test_automatic_factors_by_hand():
    assert automatic_factors(0.5)(torch.tensor([0.0, 1.5]), torch.tensor(3.0)).tolist() == [6.0, 1.5]
    for gamma in (0.0, float("nan")):
        with pytest.raises(ValueError, match="gamma > 0"):
            automatic_factors(gamma)
