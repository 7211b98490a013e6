"""An unaltered run passes every check of `reaccount`, and each altered file fails the check that covers it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.audit.reaccount import CHECKS, main, verify
from groupwise.config.compose import compose_run
from groupwise.run import run

ROOT = Path(__file__).resolve().parents[2]


def smoke(folder: Path, *overrides: str) -> Path:
    """The folder of a finished run."""
    given = ["task=cifar", "scale=smoke", f"paths.results={folder}", *overrides]
    run(compose_run(given, ROOT / "conf"))
    return next((folder / "runs").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return smoke(tmp_path_factory.mktemp("results"), "clip=adaptive_layer", "privacy.epsilon=3")


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def failed(folder: Path, *names: str) -> set[str]:
    """The checks that fail, among all or those named."""
    return {name for name, (good, _) in verify(folder, names or tuple(CHECKS)).items() if not good}


def rewrite(folder: Path, name: str, **changes) -> None:
    """Set dotted keys of a JSON file."""
    path = folder / f"{name}.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        place = content
        *outer, last = key.split("__")
        for part in outer:
            place = place[part]
        place[last] = value
    path.write_text(json.dumps(content))


def test_unaltered_run_passes(finished, capsys):
    assert main([str(finished)]) == 0
    printed = capsys.readouterr().out
    lines = [line.split(" | ") for line in printed.splitlines()[2:] if line.startswith("| ")]
    assert [(name.removeprefix("| "), result) for name, result, *_ in lines] == [(name, "ok") for name in CHECKS]
    assert "| steps | ok | 4 steps, each once; 0 were run again" in printed
    assert printed.endswith("all checks pass\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["clip=none"],
        ["clip=fixed_layer", "noise=weighted", "privacy.accountant=pld"],
        ["clip=flat", "privacy.accountant=rdp", "privacy.epsilon=null", "privacy.noise_multiplier=2"],
        ["clip=ghost", "privacy=shuffle", "privacy.delta=null"],
        ["clip=adaptive_flat", "debug.noise_seed=3", "noise.secure=true"],
        ["clip=fixed_block", "noise=equal_budget", "train.batch_size=null", "train.sample_rate=0.1", "train.steps=null",
         "train.epochs=0.4"],
    ],
    ids=["none", "pld", "rdp", "shuffle", "seeded", "rate"],
)  # fmt: skip
def test_every_kind_of_run_passes(tmp_path, overrides):
    assert not failed(smoke(tmp_path, *overrides))


TAMPERED = [
    ("plan", "privacy", {"plan__steps": 3}),
    ("plan", "privacy", {"plan__epsilon": 2.0}),
    ("plan", "privacy", {"plan__delta": 1e-3}),
    ("plan", "privacy", {"plan__dataset_size": 2560}),
    ("plan", "privacy", {"plan__expected_batch_size": 16}),
    ("plan", "privacy", {"plan__quantile_budget": 0.5}),
    ("plan", "privacy", {"plan__sampling": "shuffle"}),
    ("plan", "data", {"train_examples": 1000}),
    ("plan", "privacy", {"plan__count_noise_multiplier": 1.0}),
    ("plan", "privacy", {"plan__gradient_noise_multiplier": 0.1}),
    ("plan", "privacy", {"plan__num_groups": 3}),
    ("steps", "privacy", {"executed_steps": 3}),
    ("steps", "privacy", {"spent__executed_steps": 5}),
    ("private or not", "privacy", {"private": False}),
    ("private or not", "privacy", {"spent__guaranteed": False}),
    ("private or not", "seeds", {"noise_is_secret": False}),
    ("private or not", "seeds", {"noise_seed": 3}),
    ("epsilon", "privacy", {"spent__epsilon": 2.5}),
    ("epsilon", "privacy", {"spent__delta": 1e-3}),
    ("epsilon", "privacy", {"spent__epsilon": 3.5, "spent__prv__upper": 3.5}),
    ("epsilon", "privacy", {"spent__epsilon": 2.5, "spent__prv__upper": 2.5}),
    ("epsilon", "privacy", {"plan__noise_multiplier": 0.5}),
    ("configuration", "result", {"plan.epsilon": 1.0}),
    ("configuration", "result", {"clip.threshold": 2.0}),
    ("configuration", "result", {"hash": "0" * 64}),
]


@pytest.mark.parametrize(("name", "file", "changes"), TAMPERED, ids=[f"{n}: {c}" for n, _, c in TAMPERED])
def test_altered_value_fails_its_check(copy, name, file, changes):
    rewrite(copy, file, **changes)
    assert failed(copy, name) == {name}


def test_consistently_reduced_noise_fails_the_epsilon_check(copy):
    """σ, σ_b and σ_new are reduced consistently in the plan and the row, so only ε is wrong."""
    plan = json.loads((copy / "privacy.json").read_text())["plan"]
    smaller = {key: plan[key] / 1.1 for key in plan if key.endswith("noise_multiplier")}
    rewrite(copy, "privacy", **{f"plan__{key}": value for key, value in smaller.items()})
    rewrite(copy, "result", **{f"plan.{key}": value for key, value in smaller.items()})
    assert failed(copy) == {"epsilon"}


def edited(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    """A function that changes the lines of a file in a folder."""
    return lambda folder: (folder / name).write_text("".join(change((folder / name).read_text().splitlines(True))))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("steps", edited("metrics.jsonl", lambda lines: [lines[0], *lines[2:]])),
        ("steps", edited("metrics.jsonl", lambda lines: [*lines[:2], *lines[1:]])),
        ("steps", edited("metrics.jsonl", lambda lines: [lines[1], lines[0], *lines[2:]])),
        ("configuration", edited("config.yaml", lambda lines: [line.replace("seed: 0", "seed: 1") for line in lines])),
        ("private or not", lambda folder: (folder / "checkpoint-previous.pt").write_bytes(b"key")),
    ],
    ids=["missing step", "repeated step", "other order of steps", "other seed", "checkpoint left"],
)
def test_altered_or_extra_file_fails_its_check(copy, name, harm):
    harm(copy)
    assert failed(copy, name) == {name}


def test_invalid_json_fails_all_checks_without_raising(copy, capsys):
    (copy / "privacy.json").write_text("[]")
    assert main([str(copy)]) == 1
    assert f"FAILED: {', '.join(CHECKS)}" in capsys.readouterr().out


def test_unfinished_run_gives_one_sentence(copy, tmp_path, capsys):
    (copy / "DONE").unlink()
    for folder in (tmp_path / "nothing", tmp_path, copy):
        assert main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
