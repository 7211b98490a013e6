"""The examples of private training keep their budget and learn, a seed in the noise key's place; a rule is used."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import attach, rules
from groupwise.clipping.partition import per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.privacy import NoiseSource

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The numbers of the last line that an example prints."""
    monkeypatch.setattr(NoiseSource, "fresh", lambda: NoiseSource.from_seed(0))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [float(number) for number in re.findall(r"[\d.]+", capsys.readouterr().out.splitlines()[-1])]


@pytest.mark.slow  # test_method.py and test_loops.py learn within their budgets fast
def test_a_network_of_ones_own_reads_digits(monkeypatch, capsys):
    epsilon, accuracy = printed("own_model.py", monkeypatch, capsys)
    assert 7.9 < epsilon <= 8
    assert accuracy >= 0.9
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 42


@pytest.mark.slow
def test_groups_of_ones_own_each_get_a_threshold(monkeypatch, capsys):
    monkeypatch.setattr(NoiseSource, "fresh", lambda: NoiseSource.from_seed(0))
    runpy.run_path(str(EXAMPLES / "custom_partition.py"), run_name="__main__")
    *groups, last = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: (int(line.split()[1]), float(line.split()[-1])) for line in groups}
    assert {name: layers for name, (layers, _) in told.items()} == {"rest": 7, "attention": 4, "mlp": 4}
    thresholds = [threshold for _, threshold in told.values()]
    assert len({*thresholds}) == 3 and sum(t * t for t in thresholds) == pytest.approx(1, abs=0.01)  # moved, rescaled
    epsilon, accuracy = map(float, re.findall(r"[\d.]+", last))
    assert 7.9 < epsilon <= 8 and accuracy >= 0.8
    assert len((EXAMPLES / "custom_partition.py").read_text().splitlines()) <= 65


@pytest.mark.slow
def test_adapters_of_a_llama_learn_to_count(monkeypatch, capsys):
    epsilon, before, after = printed("lora.py", monkeypatch, capsys)
    assert 7.9 < epsilon <= 8
    assert before > 3 and after < 0.5


@pytest.mark.parametrize("slopes", [1, 4])
def test_a_rule_of_ones_own_is_used_once_it_is_imported(slopes, monkeypatch):
    monkeypatch.setattr(rules.base, "_RULES", [*rules.base._RULES])  # for this test alone
    own = runpy.run_path(str(EXAMPLES / "prelu_rule.py"))["PReLURule"]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(slopes), nn.Flatten(), nn.Linear(36, 3)).double()
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.arange(6) % 3
    assert rules.base.find_rule(model[1]) is own
    partition = per_layer(model)

    def loop(thresholds):
        return clipped_sums(model, lambda i: F.cross_entropy(model(x[[i]]), y[[i]]), range(6), partition, thresholds)

    thresholds = loop([1.0] * 3).norms.median(1).values  # clips some, leaves others
    told = loop(thresholds)
    with attach(model, partition, thresholds) as engine:
        engine.clip(lambda rows: F.cross_entropy(model(x[list(rows)]), y[list(rows)], reduction="none"), range(6))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, told.sums[name], rtol=1e-9, atol=1e-12)
