"""`PrivateTrainer` killed, resumed and exported has the losses, the weights and the scores of `run.py`'s own run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from groupwise.run import run
from groupwise.training.checkpoint import load_checkpoint
from tests.integrations.suite import ROOT, Logged, MeanRoberta, configured, trainer_of, weights

GIVEN = ["debug.noise_seed=5", "train.sample_rate=null", "train.threads=1"]
TINY = ["scale=smoke", "train.batch_size=16", "train.microbatch=4", "privacy.accountant=rdp"]
REAL = ["scale=mini", "train.batch_size=1024", "train.microbatch=256"]
DATA = Path(os.environ.get("GROUPWISE_DATA", ROOT / "data")) / "glue" / "SST-2" / "train.tsv"


@pytest.mark.parametrize(
    ("words", "save", "end"),
    [
        pytest.param(
            TINY, 1, 3, id="made up", marks=pytest.mark.slow
        ),  # resuming has fast tests in test_transformers.py
        pytest.param(
            REAL,
            20,
            90,
            id="SST-2",
            marks=[pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="needs SST-2 in $GROUPWISE_DATA")],
        ),
    ],
)
def test_killed_resumed_and_exported_it_is_the_run_of_the_suite(tmp_path, words, save, end):
    words = [*GIVEN, *words]
    config = configured(*words, f"paths.results={tmp_path}")
    threads = torch.get_num_threads()
    row = run(config)
    (folder,) = (tmp_path / "runs").iterdir()
    steps, out = row["plan.steps"], tmp_path / "trainer"
    killed = subprocess.run(
        [sys.executable, "-m", "tests.integrations.suite", str(out), str(steps), str(save), str(end), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    trainer = trainer_of(config, out, steps, save)
    logged: dict[int, float] = {}
    trainer.add_callback(Logged(logged))
    metrics = trainer.train(True).metrics
    torch.set_num_threads(threads)

    whole, theirs = weights(trainer.model), load_checkpoint(folder / "model.pt")
    assert whole.keys() == theirs.keys()
    assert all(torch.equal(whole[name], theirs[name]) for name in whole), "the weights, bit for bit"
    assert metrics["epsilon"] == pytest.approx(row["plan.spent_epsilon"], rel=1e-9)
    steps_of_run = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["nonprivate/loss"] for line in steps_of_run if "nonprivate/loss" in line}
    assert list(logged) == list(range(end // save * save + save, steps + 1, save)), "after the kill"
    for step, loss in logged.items():
        mean = sum(losses[s] for s in range(step - save + 1, step + 1)) / save
        assert loss == pytest.approx(mean, rel=1e-5), step

    scores = trainer.evaluate()
    assert 100 * scores["eval_accuracy"] == pytest.approx(row["valid/accuracy"])
    assert scores["eval_loss"] == pytest.approx(row["valid/loss"], rel=1e-4)
    trainer.save_model(str(tmp_path / "export"))
    loaded = weights(MeanRoberta.from_pretrained(tmp_path / "export"))
    assert all(torch.equal(whole[name], loaded[name]) for name in whole)
