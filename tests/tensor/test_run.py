"""Cut tensors through the whole program at scale=smoke: as one process, stopped and taken up, and exported."""

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.data import synthetic_text
from groupwise.run import run
from groupwise.tensor.trainer import TensorTrainer
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CUT = ("parallel.kind=tensor", "parallel.ranks=2", "train.device=cpu")
PLAIN = ("privacy=noiseless", "model.dropout=0", "model.attention_dropout=0", "optim=sgd", "optim.learning_rate=1")
NOISED = ("debug.noise_seed=1", "privacy.accountant=rdp", "model.dropout=0.1", "model.attention_dropout=0.1")


def smoke(results, *overrides):
    given = ["task=e2e", "scale=smoke", "clip=adaptive_layer", "clip.threshold=1", f"paths.results={results}"]
    return compose_run([*given, "train.steps=3", *overrides], ROOT / "conf")


def _few_texts():
    return patch.multiple(synthetic_text, TRAIN=200, VALID=40, REQUESTS=8)


def _stopping(trainer, step, real=TensorTrainer.step):
    """The first process is asked to stop after the first step."""
    parts = real(trainer, step)
    if step == 0 and trainer.ranks.main:
        os.kill(os.getpid(), signal.SIGINT)
    return parts


def _on_two(rank, world, folder):
    with _few_texts():
        ranks = Ranks(parts=2)
        run(smoke(f"{folder}/plain", *CUT, *PLAIN, f"export={folder}/exported"), ranks)
        run(smoke(f"{folder}/whole", *CUT, *NOISED), ranks)
        with patch.object(TensorTrainer, "step", _stopping), pytest.raises(KeyboardInterrupt):
            run(smoke(f"{folder}/stopped", *CUT, *NOISED), ranks)
        run(smoke(f"{folder}/stopped", *CUT, *NOISED), ranks)


def _model(folder):
    (found,) = (folder / "runs").glob("*/model.pt")
    return load_checkpoint(found)


@pytest.mark.slow
def test_a_run_is_that_of_one_process_and_goes_on_where_it_was_stopped(tmp_path):
    run_ranks(_on_two, 2, str(tmp_path))
    with _few_texts():
        run(smoke(tmp_path / "one", *PLAIN))
    cut, one = _model(tmp_path / "plain"), _model(tmp_path / "one")
    assert cut.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(cut[name], tensor, rtol=1e-4, atol=1e-6)
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(tensor, cut[name]) for name, tensor in exported.items())
    whole, stopped = _model(tmp_path / "whole"), _model(tmp_path / "stopped")
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in whole.items())
