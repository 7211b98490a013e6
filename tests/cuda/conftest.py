"""Runs what is emulated in processes of their own: it has to be loaded before torch, and patches globals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated import guard

ROOT = Path(__file__).parents[2]
BEGIN = """
from benchmarks.emulated import guard
guard.load()
import torch
from benchmarks.emulated.device import EmulatedGPU, Refused, Waits, emulate, on_device
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Callable[..., str]:
    """Run Python with arguments from the checkout; its output."""
    if reason := guard.why_not():
        pytest.skip(reason)
    cache = tmp_path_factory.getbasetemp() / "emulated"

    def run(*arguments: str) -> str:
        environment = os.environ | {"GROUPWISE_CACHE": os.environ.get("GROUPWISE_CACHE", str(cache))}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


Rows = dict[tuple[str, ...], dict[str, Any]]
SEVERAL = """
import json, sys
from benchmarks.emulated import guard
from benchmarks.emulated.__main__ import main
for options in json.loads(sys.argv[1]):
    assert main(options) == 0
    guard.load = lambda: None  # it is loaded once a process
"""


def read(path: Path) -> Rows:
    rows = json.loads(path.read_text())
    return {tuple(row[key] for key in ("model", "mode", "layout", "precision")): row for row in rows}


@pytest.fixture(scope="session")
def emulate(python, tmp_path_factory) -> Callable[..., Rows]:
    """Steps on the emulated GPU, `key=value` as of `python -m benchmarks.emulated`: rows by (model, mode, layout,
    precision)."""

    def run(*options: str) -> Rows:
        path = tmp_path_factory.mktemp("emulated") / "rows.json"
        python("-m", "benchmarks.emulated", *options, f"json={path}")
        return read(path)

    return run


@pytest.fixture(scope="session")
def emulate_several(python, tmp_path_factory) -> Callable[[list[list[str]]], list[Rows]]:
    """The same for several lists of options, one after the other in one process."""

    def run(several: list[list[str]]) -> list[Rows]:
        folder = tmp_path_factory.mktemp("emulated")
        paths = [folder / f"{number}.json" for number in range(len(several))]
        given = [[*options, f"json={path}"] for options, path in zip(several, paths, strict=True)]
        python("-c", SEVERAL, json.dumps(given))
        return [read(path) for path in paths]

    return run


@pytest.fixture(scope="session")
def on_gpu(python) -> Callable[[str], str]:
    """Run lines of Python in a process that has the emulated GPU's names; what they print."""
    return lambda lines: python("-c", BEGIN + lines)
