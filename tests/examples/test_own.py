"""The examples of private training learn within their privacy budget, and an imported custom rule is used."""

import re
import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import attach, rules
from groupwise.clipping.partition import per_layer
from tests.clipping.alone import assert_exact
from tests.examples.conftest import EXAMPLES


@pytest.mark.slow  # test_method.py and test_loops.py are the fast tests
def test_own_network_learns_digits(numbers):
    epsilon, accuracy = numbers("own_model.py", most=42)
    assert 7.9 < epsilon <= 8
    assert accuracy >= 0.9


@pytest.mark.slow
def test_custom_groups_each_get_a_threshold(run):
    *groups, last = run("custom_partition.py", most=65)
    found = {line.split()[0]: (int(line.split()[1]), float(line.split()[-1])) for line in groups}
    assert {name: layers for name, (layers, _) in found.items()} == {"rest": 7, "attention": 4, "mlp": 4}
    thresholds = [threshold for _, threshold in found.values()]
    assert len({*thresholds}) == 3 and sum(t * t for t in thresholds) == pytest.approx(1, abs=0.01)  # updated, rescaled
    epsilon, accuracy = map(float, re.findall(r"[\d.]+", last))
    assert 7.9 < epsilon <= 8 and accuracy >= 0.8


@pytest.mark.slow
def test_adapters_of_a_llama_learn_to_count(numbers):
    epsilon, before, after = numbers("lora.py", most=1000)
    assert 7.9 < epsilon <= 8
    assert before > 3 and after < 0.5


@pytest.mark.parametrize("slopes", [1, 4])
def test_custom_rule_is_used_once_it_is_imported(slopes, monkeypatch):
    monkeypatch.setattr(rules.base, "_RULES", [*rules.base._RULES])  # only for this test
    own = runpy.run_path(str(EXAMPLES / "prelu_rule.py"))["PReLURule"]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(slopes), nn.Flatten(), nn.Linear(36, 3)).double()
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.arange(6) % 3
    assert rules.base.find_rule(model[1]) is own
    with attach(model, per_layer(model), 1.0) as engine:
        assert_exact(
            engine, lambda rows: F.cross_entropy(model(x[list(rows)]), y[list(rows)], reduction="none"), range(6)
        )
