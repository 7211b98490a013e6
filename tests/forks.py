"""Runs commands in forks of a process that has already imported torch and the other slow libraries.

A command imports this project's modules itself, as a new process would.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

FORKS = multiprocessing.get_context("forkserver")  # a plain fork would share torch's threads and a test's state
FORKS.set_forkserver_preload(["tests.libraries"])
OURS = ("groupwise", "tests")
_removed: list[ModuleType] = []
"""Modules removed from `sys.modules`, kept alive because torchvision's operators vanish with their module."""


class Command:
    """A Python command in a process of its own, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, *arguments: str, cwd: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start ``python script.py …`` or ``python -m module …``, given without Python, in the folder ``cwd``."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._process = FORKS.Process(target=_run, args=(arguments, str(cwd), dict(environment), folder), daemon=True)
        self._process.start()
        self._output = folder

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that killed the process; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait until the process ends; return its exit code."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Wait until the process ends; return its exit code and what it wrote to stdout and stderr."""
        return (self.wait(), *((self._output / name).read_text() for name in ("out", "err")))


def _run(arguments: tuple[str, ...], cwd: str, environment: dict[str, str], folder: Path) -> None:
    """Do in this fork what ``python script.py …`` or ``python -m module …`` would do in the folder `cwd`."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    ours = [name for name in sys.modules if name.partition(".")[0] in OURS]
    _removed.extend(sys.modules.pop(name) for name in ours)
    multiprocessing.current_process()._config["daemon"] = False  # a daemon could not start processes
    module = arguments[0] == "-m"
    sys.argv = list(arguments[module:])
    script = Path(sys.argv[0])
    sys.path[:0] = [cwd if module else str(script.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")
