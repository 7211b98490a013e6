"""The set-up files agree with one another: one file of pins, used by pip, conda and make."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pins() -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


def test_every_requirement_is_pinned_exactly_and_once() -> None:
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert len(names) == len(set(names))
    for pin in pins():
        [specifier] = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, f"{pin} is no exact pin"


def test_the_conda_environment_has_the_same_python_and_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) <= {"name", "channels", "dependencies", "variables"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, pip, ours = environment["dependencies"]
    assert python.removeprefix("python") == project["requires-python"] == ">=3.11,<3.14"
    assert pip.startswith("pip") and ours == {"pip": ["-r requirements.txt", "-e ."]}


def test_make_alone_prints_the_targets() -> None:
    printed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    for target in ("env", "demo", "test", "test-slow", "lint", "clean"):
        assert re.search(rf"make {target} .*\w", printed)


@pytest.fixture
def set_up(tmp_path: Path) -> Path:
    """A folder with the set-up files."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_make_refuses_another_python_and_names_those_it_needs(set_up: Path) -> None:
    old = set_up / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(["make", "env", f"PYTHON={old}"], cwd=set_up, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert not (set_up / ".venv").exists()


def test_make_rebuilds_the_environment_when_the_pins_change(set_up: Path) -> None:
    stamp = set_up / ".venv" / ".complete"
    stamp.parent.mkdir()
    stamp.touch()

    def planned() -> str:
        return subprocess.run(["make", "-n", "demo"], cwd=set_up, capture_output=True, text=True).stdout

    assert "-m venv" not in planned()
    newer = stamp.stat().st_mtime + 10
    os.utime(set_up / "requirements.txt", (newer, newer))
    assert "-m venv --clear" in planned()
    assert "run.py task=cifar clip=adaptive_layer scale=demo" in planned()


def test_make_does_not_replace_an_environment_that_it_did_not_make(set_up: Path) -> None:
    own = set_up / ".venv" / "own"
    own.parent.mkdir()
    own.touch()
    done = subprocess.run(["make", "env", f"PYTHON={sys.executable}"], cwd=set_up, capture_output=True, text=True)
    assert done.returncode == 2 and "error: .venv was not made by make" in done.stderr
    subprocess.run(["make", "clean"], cwd=set_up, capture_output=True, check=True)
    assert own.exists()
    (own.parent / ".made").touch()
    subprocess.run(["make", "clean"], cwd=set_up, capture_output=True, check=True)
    assert not own.parent.exists()
