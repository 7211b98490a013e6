"""Whole runs at scale=smoke: their records, mistakes that are refused before anything is written, and kill -9."""

import itertools
import json
import os
import random
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.run import require_gpu_for_the_paper, run
from groupwise.training.step import Trainer
from tests.forks import Command
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
RDP = "privacy.accountant=rdp"
"""The quick accountant, for tests that do not check epsilon."""
GIVEN = ("privacy.epsilon=null", "privacy.noise_multiplier=0.001")
"""So little noise that epsilon has a closed form, because each new process would have to compose it."""
PLANNED = "train.steps=2"
"""The steps of most runs here, so that their plan is calibrated, and its epsilon composed, only once."""
MODES = ("none", "flat", "ghost", "fixed_layer", "adaptive_layer", "adaptive_flat", "fixed_block", "adaptive_block")


def smoke(tmp_path: Path, *overrides: str):
    return compose_run(["task=cifar", "scale=smoke", f"paths.results={tmp_path}", *overrides], ROOT / "conf")


def command(tmp_path: Path, *overrides: str) -> Command:
    words = [str(ROOT / "run.py"), "task=cifar", "scale=smoke", f"paths.results={tmp_path}", *overrides]
    return Command(*words, cwd=ROOT, environment=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_leaves_its_record(tmp_path, mode, capsys):
    row = run(smoke(tmp_path, f"clip={mode}", PLANNED))
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "git.json",
        "data.json",
        "seeds.json",
        "privacy.json",
        "metrics.jsonl",
        "model.pt",
        "DONE",
    } <= names
    assert "checkpoint.pt" not in names  # it holds the key of the noise
    privacy = json.loads((folder / "privacy.json").read_text())
    assert privacy["executed_steps"] == 2 and row["scale"] == "smoke"
    assert row["plan.private"] is (mode != "none")
    if mode == "none":
        assert privacy["spent"]["epsilon"] == "inf"
    else:
        assert privacy["spent"]["epsilon"] <= 8.0 and privacy["spent"]["rdp"] > privacy["spent"]["epsilon"]
    printed = capsys.readouterr().out
    assert "Privacy:" in printed and "Spent:" in printed and "accuracy" in printed
    lines = [line for line in printed.splitlines() if not line.startswith("Record: ")]
    assert max(map(len, lines)) <= 80
    run(smoke(tmp_path, f"clip={mode}", PLANNED))
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("Already done: ")
    assert again[1:] == lines[-2:]  # the spent epsilon, and the final metrics


def test_explain_prints_each_layers_formula_and_trains_nothing(tmp_path, capsys, monkeypatch):
    assert run(smoke(tmp_path, "explain=true", "clip.formula=materialize", RDP)) == {}
    printed = capsys.readouterr().out
    assert "stem" in printed and "WSConv2d" in printed and "materialize" in printed and "µs an example" in printed
    assert not (tmp_path / "runs").exists()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("groupwise.training.train.evaluate", Mock(side_effect=KeyboardInterrupt))
        run(smoke(tmp_path, "clip.formula=materialize", RDP))
    capsys.readouterr()
    run(smoke(tmp_path, "explain=true", "clip.formula=materialize", RDP))
    assert capsys.readouterr().out == printed, "the same for an interrupted run"


def test_metrics_that_are_not_private_are_named_nonprivate(tmp_path):
    run(smoke(tmp_path, PLANNED))
    lines = next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    released = {"step", "seconds", "learning_rate", "noise_norm", "epsilon_bound", "valid/accuracy", "valid/loss"}
    assert all(key.startswith(("nonprivate/", "threshold/")) for key in keys - released)


@pytest.mark.slow
def test_compiled_model_trains(tmp_path):
    assert run(smoke(tmp_path, "train.compile=true", PLANNED))["valid/accuracy"] > 0


REFUSED = {
    "batch larger than the data": (["train.batch_size=100000"], "larger than the training set"),
    "parameter in no group": (
        ["clip=flat", "clip.grouping=custom", "+clip.mapping={stem*:a}"],
        "belongs to no clipping group",
    ),
    "pattern of no layer": (
        ["clip=flat", "clip.grouping=custom", "+clip.mapping={stm*:early,*:late}"],
        r"'stm\*' of clipping group 'early' matches no trainable layer .there are 'stem'",
    ),
    "missing data": (["data.name=cifar10", "data.image_size=16", "paths.data={tmp}/nowhere"], "nowhere"),
    "incomplete data": (["data.name=cifar10", "paths.data={tmp}/broken"], "train_shard1.webp is missing"),
    "no GPU": (["train.device=cuda"], "no GPU"),
    "unwritable results": (["paths.results={tmp}/file"], "cannot be written"),
    "resume of nothing": (["resume={tmp}/nowhere"], "not a folder"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_one_sentence_before_anything_is_written(tmp_path, mistake, monkeypatch):
    if mistake == "no GPU" and torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("http_proxy", "https_proxy"):  # a download must fail at once, wherever the test runs
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "file").write_text("")
    (tmp_path / "broken" / "cifar10").mkdir(parents=True)
    (tmp_path / "broken" / "cifar10" / "train_shard0.webp").write_text("")
    before = sorted(tmp_path.rglob("*"))
    overrides, sentence = REFUSED[mistake]
    with pytest.raises(UserError, match=sentence) as error:
        run(smoke(tmp_path / "results", *(override.replace("{tmp}", str(tmp_path)) for override in overrides)))
    assert "\n" not in str(error.value)
    assert sorted(path for path in tmp_path.rglob("*") if "nowhere" not in str(path)) == before


def paper(tmp_path: Path, *overrides: str):
    """The paper's scale on a few small images and a small network."""
    small = ["data.name=digits", "data.train_limit=64", "model.depth=10", "model.width=1", "model.norm_groups=8"]
    small += ["data.image_size=null", "train.batch_size=32", "train.epochs=2", "train.threads=1"]
    return compose_run(["task=cifar", f"paths.results={tmp_path}", *small, RDP, *overrides], ROOT / "conf", typed=False)


def test_the_papers_scale_without_a_gpu_is_refused_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="2 epochs of wide_resnet") as error:
        run(paper(tmp_path))
    message = str(error.value)
    assert "no GPU" in message and "scale=" in message and "train.device=cpu" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("override", ["train.device=cpu", "train.steps=1", "scale=mini", "explain=true"])
def test_an_explicit_device_scale_or_number_of_steps_needs_no_gpu(tmp_path, monkeypatch, override):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_gpu_for_the_paper(paper(tmp_path, override))


def test_a_resumed_run_prints_its_step_and_needs_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = paper(tmp_path, "train.checkpoint_every=0")
    step = Trainer.step
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.run.require_gpu_for_the_paper", lambda config: None)  # it began where there was one
        patch.setattr(Trainer, "step", lambda self, t: os.kill(os.getpid(), signal.SIGTERM) or step(self, t))
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert "Resuming" not in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    for name, altered in (("checkpoint.pt", {"thresholds": 0.5}), ("privacy.json", {"replayed_steps": [1]})):
        whole = (path := folder / name).read_bytes()
        if name == "checkpoint.pt":
            torch.save(torch.load(path) | altered, path)
        else:
            path.write_text(json.dumps(json.loads(whole) | altered))
        with pytest.raises(UserError, match="altered"):
            run(config)
        path.write_bytes(whole)
    assert run(config)["plan.steps"] == 4
    assert "Resuming after step 1 of 4, from checkpoint.pt.\n" in capsys.readouterr().out


def finished(folder: Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    privacy = json.loads((folder / "privacy.json").read_text())
    return torch.load(folder / "model.pt"), privacy["thresholds"], privacy["plan"]


def killed_after(step: int, process: Command, runs: Path) -> bool:
    """Kill a run a little after its files show that step; return False if it ended before."""

    def reached() -> bool:
        lines = [line for file in runs.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
        return len(lines) >= step or process.poll() is not None

    until(reached, f"step {step}, or the end")
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(tmp_path, times):
    settings = [
        "clip=adaptive_layer",
        "train.steps=12",
        "train.checkpoint_every=0",
        "debug.noise_seed=5",
        "train.microbatch=8",
        *GIVEN,
    ]
    code, _, errors = command(tmp_path / "whole", *settings).finish()
    assert code == 0, errors
    expected = finished(next((tmp_path / "whole" / "runs").iterdir()))
    kills, chance = 0, random.Random(0)
    for chain in itertools.count():  # on a busy machine a run may end before it is killed: try another one
        runs = tmp_path / f"killed-{chain}" / "runs"
        for step in sorted(chance.choices(range(1, 9), k=times)):
            kills += killed_after(step, command(runs.parent, *settings), runs)
        code, _, errors = command(runs.parent, *settings).finish()
        assert code == 0, errors
        model, thresholds, plan = finished(next(runs.iterdir()))
        assert all(torch.equal(model[name], expected[0][name]) for name in expected[0])
        assert thresholds == expected[1] and plan == expected[2]
        if kills >= times:
            break
    steps = [json.loads(line)["step"] for line in next(runs.glob("*/metrics.jsonl")).read_text().splitlines()]
    assert steps == [*range(1, 13), 12]  # no step twice, none missing; the last line is the final evaluation


def test_sigint_saves_a_checkpoint_and_says_how_to_resume(tmp_path):
    settings = ["train.steps=4000", "train.checkpoint_every=1000", *GIVEN]
    process = command(tmp_path, *settings)

    def logged() -> Path | None:
        assert process.poll() is None, process.finish()
        return next((file for file in tmp_path.glob("runs/*/metrics.jsonl") if file.stat().st_size), None)

    metrics = until(logged, "a step")
    process.send_signal(signal.SIGINT)
    code, _, errors = process.finish()
    assert code == 130 and "resumes from the last checkpoint" in errors and "Traceback" not in errors
    assert torch.load(metrics.parent / "checkpoint.pt")["step"] >= 1
