"""Whole runs at scale=smoke: the record they leave, what they refuse before writing anything, and kill -9."""

import itertools
import json
import os
import random
import signal
from pathlib import Path

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
"""The quick accountant, where the claim is about something else than epsilon."""
GIVEN = ("privacy.epsilon=null", "privacy.noise_multiplier=0.001")
"""So little noise that epsilon has a closed form: a process of its own would compose it anew."""
PLANNED = "train.steps=2"
"""Of most runs here: one plan is calibrated, and its epsilon composed, once for all of them."""
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
    told = [line for line in printed.splitlines() if not line.startswith("Record: ")]
    assert max(map(len, told)) <= 80
    run(smoke(tmp_path, f"clip={mode}", PLANNED))
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("Already done: ")
    assert again[1:] == told[-2:]  # what it spent, and what it reached


def test_explain_prints_each_layers_formula_and_trains_nothing(tmp_path, capsys):
    assert run(smoke(tmp_path, "explain=true", "clip.formula=materialize", RDP)) == {}
    printed = capsys.readouterr().out
    assert "stem" in printed and "WSConv2d" in printed and "materialize" in printed and "µs an example" in printed
    assert not (tmp_path / "runs").exists()


def test_a_shuffled_run_is_no_guarantee(tmp_path, capsys):
    row = run(smoke(tmp_path, "privacy=shuffle", PLANNED))
    assert row["plan.private"] is False
    assert "not a guarantee" in capsys.readouterr().out


def test_what_is_no_private_release_is_named_so(tmp_path):
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
def test_a_mistake_is_one_sentence_before_anything_is_written(tmp_path, mistake, monkeypatch):
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


def test_the_papers_cell_without_a_gpu_asks_for_a_scale_or_the_cpu_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="2 epochs of wide_resnet") as error:
        run(paper(tmp_path))
    told = str(error.value)
    assert "no GPU" in told and "scale=" in told and "train.device=cpu" in told and "\n" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("override", ["train.device=cpu", "train.steps=1", "scale=mini", "explain=true"])
def test_who_says_what_is_meant_is_not_asked(tmp_path, monkeypatch, override):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_gpu_for_the_paper(paper(tmp_path, override))


def test_a_run_that_was_interrupted_says_after_which_step_it_goes_on_and_needs_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = paper(tmp_path, "train.checkpoint_every=0")
    step = Trainer.step
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.run.require_gpu_for_the_paper", lambda config: None)  # it began where there was one
        patch.setattr(Trainer, "step", lambda self, t: os.kill(os.getpid(), signal.SIGTERM) or step(self, t))
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert "Going on" not in capsys.readouterr().out
    assert run(config)["plan.steps"] == 4
    assert "Resuming after step 1 of 4, from checkpoint.pt.\n" in capsys.readouterr().out


def finished(folder: Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    privacy = json.loads((folder / "privacy.json").read_text())
    return torch.load(folder / "model.pt"), privacy["thresholds"], privacy["plan"]


def killed_after(step: int, process: Command, runs: Path) -> bool:
    """Kill a run a little after its files show that step; false if it ended before."""

    def come() -> bool:
        lines = [line for file in runs.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
        return len(lines) >= step or process.poll() is not None

    until(come, f"step {step}, or the end")
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
    code, _, told = command(tmp_path / "whole", *settings).finish()
    assert code == 0, told
    expected = finished(next((tmp_path / "whole" / "runs").iterdir()))
    kills, chance = 0, random.Random(0)
    for chain in itertools.count():  # on a busy machine a run may be done before its time has come: then another
        runs = tmp_path / f"killed-{chain}" / "runs"
        for step in sorted(chance.choices(range(1, 9), k=times)):
            kills += killed_after(step, command(runs.parent, *settings), runs)
        code, _, told = command(runs.parent, *settings).finish()
        assert code == 0, told
        model, thresholds, plan = finished(next(runs.iterdir()))
        assert all(torch.equal(model[name], expected[0][name]) for name in expected[0])
        assert thresholds == expected[1] and plan == expected[2]
        if kills >= times:
            break
    steps = [json.loads(line)["step"] for line in next(runs.glob("*/metrics.jsonl")).read_text().splitlines()]
    assert steps == [*range(1, 13), 12]  # no step twice, none missing; the last line is the final evaluation


def test_a_polite_stop_saves_and_says_how_to_go_on(tmp_path):
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
