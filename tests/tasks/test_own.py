"""A user's own task needs one configuration file and one Python file; errors in them are reported in one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from groupwise.config.identity import config_hash, stable_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.tasks import make_task
from tests.forks import Command

ROOT = Path(__file__).parents[2]
CONF = """# @package _global_
task: mine
own_task: {_target_: sums.make_sums, features: 3}
"""
MODULE = '''"""Classifies rows of numbers by the sign of their sum."""
import torch
from torch import nn

from groupwise.training.task import Task


class Sums(Task):
    def __init__(self, x, device):
        self.model, self.train_size = nn.Sequential(nn.Linear(x.shape[1], 2), nn.Dropout()).to(device), len(x)
        self.x, self.y = x.to(device), (x.sum(1) > 0).long().to(device)

    def read(self, examples, even=False):
        return self.x[examples], self.y[examples]

    def losses(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def evaluate(self, split, batch_size, limit=None, final=False):
        first, second = (torch.from_numpy(self.model(self.x).numpy()) for _ in range(2))  # without gradients
        assert torch.equal(first, second), "evaluated with dropout"
        return {"accuracy": 100 * (first.argmax(1) == self.y).double().mean()}

    def describe_data(self):
        return {"source": "made up", "sha256": {}, "train_examples": len(self.x), "selected_on": "nothing"}


def make_sums(config, device, features=2):
    x = torch.randn(400, features, generator=torch.Generator().manual_seed(0))
    return Sums(x, device)


class Centred(nn.Module):
    """Subtracts the mean of the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.fitted = False

    def forward(self, x):
        if not self.fitted:
            self.mean.copy_(x.mean(0))
            self.fitted = True
        return x - self.mean


def make_centred(config, device, features=3):
    task = make_sums(config, device, features)
    task.model = nn.Sequential(Centred(), task.model)
    return task


def nothing(config, device):
    return None
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with my_conf/task/mine.yaml and sums.py."""
    (tmp_path / "my_conf" / "task").mkdir(parents=True)
    (tmp_path / "my_conf" / "task" / "mine.yaml").write_text(CONF)
    (tmp_path / "sums.py").write_text(MODULE)
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [str(ROOT / "run.py"), *arguments, "--config-dir", "my_conf", "train.device=cpu"]
    return subprocess.CompletedProcess(words, *Command(*words, cwd=folder, environment=environment).finish())


def test_two_files_define_a_task_outside_of_the_package(folder: Path) -> None:
    asked = ("task=mine", "clip=flat", "train.epochs=10", "privacy.accountant=rdp", "data.holdout=0.2")
    done = command(folder, *asked, "privacy.epsilon=8")
    assert done.returncode == 0, done.stderr
    [run] = (folder / "results" / "runs").iterdir()
    row = json.loads((run / "result.json").read_text())
    assert row["valid/accuracy"] > 80 and "valid/accuracy" in done.stdout  # the classes are balanced
    assert (row["task"], row["model.name"], row["train.batch_size"]) == ("mine", "own", 256)
    assert row["plan.neighbours_differ_by"] == "one training example"  # nothing reads data.holdout
    assert json.loads(row["own_task"]) == {"_target_": "sums.make_sums", "features": 3}
    assert "Already done" in command(folder, *asked).stdout


@pytest.mark.slow
def test_own_task_works_in_sweeps_and_replicas(folder: Path) -> None:
    done = command(folder, "-m", "task=mine", "scale=smoke", "own_task.features=3,4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  done ") == 2 and len([*(folder / "results" / "runs").iterdir()]) == 2
    replicas = command(folder, "task=mine", "scale=smoke", "parallel.ranks=2", "seed=1")
    assert replicas.returncode == 0 and "Spent: epsilon" in replicas.stdout, replicas.stderr


@pytest.mark.parametrize(
    ("own_task", "words"),
    [
        ({"_target_": "nowhere.make"}, "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ({"_target_": "broken.make"}, "SyntaxError: invalid syntax"),
        ({"_target_": "sums"}, "give module.function"),
        ({"_target_": "sums.make_sum"}, "has no attribute 'make_sum'"),
        ({"_target_": "sums.nothing"}, "returned a NoneType"),
        (
            {"_target_": "sums.make_sums", "feature": 3},
            "make_sums(config, device, features): got an unexpected keyword argument 'feature'.",
        ),
    ],
)
def test_invalid_task_gives_one_sentence(
    folder: Path, own_task: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken.py").write_text("def make(:\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    with pytest.raises(UserError) as error:
        make_task(RunConfig(task="mine", own_task=own_task), torch.device("cpu"))
    assert words in str(error.value) and "\n" not in str(error.value)
    monkeypatch.delitem(sys.modules, "sums", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("own_task._target_=nowhere.make", "cannot be imported"),
        ("own_task._target_=null", "own_task has no _target_"),
        ("pipeline.stages=2", "pipeline.stages=2 does not support task=mine"),
        ("own_task._target_=sums.make_centred", "first forward pass changed '0.mean', a buffer or parameter"),
    ],
)
def test_invalid_task_on_the_command_line_writes_nothing(folder: Path, arguments: str, words: str) -> None:
    done = command(folder, "task=mine", "scale=smoke", *arguments.split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr
    assert not (folder / "results").exists()


def test_missing_config_dir_gives_one_sentence(folder: Path) -> None:
    (folder / "my_conf").rename(folder / "conf")
    for arguments in (["task=mine"], ["--help"]):
        done = command(folder, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "my_conf" in done.stderr, done.stderr


def test_hash_covers_own_task_and_is_unchanged_for_other_tasks() -> None:
    ours = {"_target_": "sums.make_sums", "features": 3}
    configs = [RunConfig(task="mine", own_task=one) for one in (ours, {**ours, "features": 4}, {"_target_": "sums.x"})]
    assert len({config_hash(config) for config in configs}) == 3
    assert "own_task" not in stable_config(RunConfig())


def test_name_of_a_built_in_task_is_refused() -> None:
    with pytest.raises(UserError, match="task=cifar is a task of this package"):
        make_task(RunConfig(task="cifar", own_task={"_target_": "sums.make_sums"}), torch.device("cpu"))
    with pytest.raises(UserError, match=r"own_task\._target_"):
        make_task(RunConfig(task="mine"), torch.device("cpu"))
