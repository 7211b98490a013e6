"""The average of the weights: by hand, lent and given back, kept through a checkpoint, and evaluated in a run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from groupwise.config.compose import compose_run
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.run import run
from groupwise.training.step import Trainer, WeightAverage
from tests.checked import checked_once

ROOT = Path(__file__).resolve().parents[2]


def test_the_average_is_the_recursion_by_hand():
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    average = WeightAverage(layer.parameters(), 0.5)
    expected = layer.weight.detach().clone()
    for step in range(6):
        with torch.no_grad():
            layer.weight.add_(step + 1.0)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * layer.weight.detach()
    own = layer.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(layer.weight.detach(), expected)
    assert torch.equal(layer.weight, own)
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert torch.equal(layer.weight, own)


def smoke(folder: Path, *overrides: str):
    settings = ["task=cifar", "scale=smoke", "clip=flat", "debug.noise_seed=1", "privacy.accountant=rdp"]
    given = {word.partition("=")[0]: word for word in (*settings, f"paths.results={folder}", *overrides)}
    return compose_run(list(given.values()), ROOT / "conf")


def run_smoke(config: RunConfig):
    with checked_once("smoke"):
        return run(config)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(next(folder.glob("runs/*/model.pt")), weights_only=True)


def test_a_run_evaluates_and_saves_the_average_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    row = run_smoke(smoke(plain))
    averaged = run_smoke(smoke(whole, "train.ema=0.9"))
    assert averaged["valid/loss"] != row["valid/loss"]
    assert averaged["hash"] != row["hash"]
    real = Trainer.step

    def stops(self, step):
        if step == 2:
            raise KeyboardInterrupt
        return real(self, step)

    again = smoke(parts, "train.ema=0.9", "train.checkpoint_every=0")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", stops)
        run_smoke(again)
    assert run_smoke(again)["valid/loss"] == averaged["valid/loss"]
    assert all(torch.equal(value, weights(parts)[name]) for name, value in weights(whole).items())
    assert any(not torch.equal(value, weights(plain)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=samsum_pipeline", "clip=per_device", "pipeline.stages=2"], "pipeline.stages=2"),
        (["clip=adaptive_layer", "parallel.kind=fsdp", "parallel.ranks=2"], "parallel.kind=fsdp"),
    ],
)
def test_stages_and_shards_have_no_average(tmp_path, overrides, words):
    with pytest.raises(UserError, match=f"train.ema=0.9 is not for {words}"):
        smoke(tmp_path, "train.ema=0.9", *overrides)
