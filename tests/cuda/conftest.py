"""Runs emulated code in separate processes, as the emulated GPU is loaded before torch and patches its globals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated import guard

ROOT = Path(__file__).parents[2]
BEGIN = """
import torch
from benchmarks.emulated.device import EmulatedGPU, Refused, Waits, emulate, on_device
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Run Python code with arguments, from the checkout, on the emulated GPU; returns its output."""
    if reason := guard.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("emulated")
    environment = {"GROUPWISE_CACHE": str(folder), **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.cuda.server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as server:

        def run(lines: str, *arguments: str) -> str:
            output = folder / f"output-{len(list(folder.iterdir()))}"
            print(json.dumps([lines, arguments, str(output)]), file=server.stdin, flush=True)
            status = server.stdout.readline()
            errors = folder / f"{output.name}-errors"
            assert status == "0\n", errors.read_text() if errors.exists() else "The server of the emulated GPU ended."
            return output.read_text()

        yield run
        server.stdin.close()


Rows = dict[tuple[str, ...], dict[str, Any]]
SEVERAL = """
import json, sys
from benchmarks.emulated.__main__ import main
for options in json.loads(sys.argv[1]):
    assert main(options) == 0
"""


def read(path: Path) -> Rows:
    rows = json.loads(path.read_text())
    return {tuple(row[key] for key in ("model", "mode", "layout", "precision")): row for row in rows}


@pytest.fixture(scope="session")
def emulate_several(python, tmp_path_factory) -> Callable[[list[list[str]]], list[Rows]]:
    """Run `python -m benchmarks.emulated` in one process for each list of options; returns rows by
    (model, mode, layout, precision)."""

    def run(several: list[list[str]]) -> list[Rows]:
        folder = tmp_path_factory.mktemp("rows")
        paths = [folder / f"{number}.json" for number in range(len(several))]
        given = [[*options, f"json={path}"] for options, path in zip(several, paths, strict=True)]
        python(SEVERAL, json.dumps(given))
        return [read(path) for path in paths]

    return run


@pytest.fixture(scope="session")
def emulate(emulate_several) -> Callable[..., Rows]:
    """`emulate_several` for one list of options."""
    return lambda *options: emulate_several([list(options)])[0]


@pytest.fixture(scope="session")
def on_gpu(python) -> Callable[[str], str]:
    """Run Python code with the names of the emulated GPU imported; returns its output."""
    return lambda lines: python(BEGIN + lines)
