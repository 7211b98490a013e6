"""Commands in the documents exist: run.py with its keys, modules with their options, make with its targets."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.main import get_args_parser

from groupwise.config.compose import compose_run, register
from groupwise.sweeps.prepare import plan_sweep
from tests.docs.documents import ROOT, blocks, commands
from tests.forks import Command

pytestmark = pytest.mark.usefixtures("every_tracker_is_installed")
CONF = ROOT / "conf"
OTHERS = {"export", "git", "pip", "conda", "squeue", "sacct", "sha256sum"}
"""Programs of others, which are not checked."""
RUNS = sorted({command for _, command in commands() if command.startswith("python run.py")})
MODULES = sorted({command for _, command in commands() if command.startswith("python -m")})


def words(command: str) -> list[str]:
    """The words of a command without its comment; `<hash>` stands for any word."""
    return [re.sub(r"<\w+>", "x", word) for word in shlex.split(command, comments=True)]


@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow] if "+sweep=" in c else []) for c in RUNS])
def test_runs_compose(command: str) -> None:
    arguments = words(command)[2:]
    given = get_args_parser().parse_intermixed_args(arguments)
    arguments = given.overrides
    if given.multirun:
        register()
        one_will_do = any(argument.startswith("hydra/launcher=") for argument in arguments)
        assert len(plan_sweep(arguments, CONF).cells or ()) >= (1 if one_will_do else 2)
    else:
        compose_run(arguments, CONF)


def source_of(module: str) -> str:
    """The source of a module, or of all modules of a package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    file = Path(spec.origin)
    return "\n".join(f.read_text() for f in (file.parent.glob("*.py") if file.name == "__init__.py" else [file]))


@pytest.mark.parametrize("command", MODULES)
def test_modules_are_commands_and_know_their_options(command: str) -> None:
    _, _, module, *arguments = words(command)
    if module in ("pytest", "venv", "pip"):
        return
    source = source_of(module)
    assert "__main__" in source or "def main" in source
    for option in re.findall(r"(?<!\S)--[\w-]+", " ".join(arguments)):
        assert f'"{option}"' in source, f"{module} does not know {option}"


@pytest.mark.parametrize(
    "command", ["-m groupwise.analysis.run_plot", "-m groupwise.models.published", "scripts/notebook.py"]
)
def test_help_is_no_argument(command: str) -> None:
    code, out, _ = Command(*command.split(), "--help", cwd=ROOT).finish()
    assert code == 0 and out.startswith("usage: ")


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z0-9_%-]+):", (ROOT / "Makefile").read_text(), re.M)
    patterns = [re.compile(target.replace("%", "[a-z0-9_]+")) for target in targets]
    named = {word for _, c in commands() if c.startswith("make ") for word in words(c)[1:] if "=" not in word}
    assert {"demo", "test"} <= named
    assert not [name for name in named if not any(pattern.fullmatch(name) for pattern in patterns)]


def test_sweeps_named_after_make_exist() -> None:
    named = {match[1] for _, command in commands() if (match := re.match(r"make sweep-(\w+)", command))}
    assert named
    assert not [name for name in named if not (ROOT / "sweeps" / f"{name}.yaml").is_file()]


def test_other_bash_commands_are_our_scripts_or_known_programs() -> None:
    for where, command in commands():
        for part in re.split(r"[;&|]+", command):
            first, *rest = [word for word in words(part) if not re.match(r"[A-Z_]+=", word)] or ["make"]
            if first in ("source", "cd", "."):
                first = rest[0]
            known = first in OTHERS | {"python", "make"} or (ROOT / first).exists()
            assert known, f"{where}: {first} is neither a file of ours nor a program that is known"


def test_commands_are_found() -> None:
    assert "python run.py task=cifar clip=adaptive_layer scale=demo" in RUNS
    assert any(" -m " in command for command in RUNS)
    assert len(MODULES) > 5


@pytest.mark.slow
def test_tutorial_of_a_small_decoder_runs_offline(tmp_path: Path) -> None:
    [block] = [block for block in blocks("bash") if "small_decoder.py" in block.text]
    for name in ("run.py", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for command in block.text.splitlines():
        done = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, command + done.stdout + done.stderr
        assert "run.py" not in command or "Spent: epsilon" in done.stdout
    assert (tmp_path / "small-llama-e2e" / "adapter_model.safetensors").is_file()
