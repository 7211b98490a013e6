"""Runs commands in forks of a process that has imported the libraries: in all else as new as a process can be.

What a command imports of this project it imports itself; what takes seconds, torch and the like, is there already.
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
_forgotten: list[ModuleType] = []
"""Ours that a fork began with; torchvision's operators are declared for as long as the module that did it lives."""


class Command:
    """A command of Python's in a process of its own, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, *arguments: str, cwd: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start ``python script.py …`` or ``python -m module …``, given without Python, in the folder ``cwd``."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._process = FORKS.Process(target=_live, args=(arguments, str(cwd), dict(environment), folder), daemon=True)
        self._process.start()
        self._output = folder

    def poll(self) -> int | None:
        """The exit code, minus the signal for one that was killed; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """The exit code, once it has ended."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, and what it wrote to stdout and stderr."""
        return (self.wait(), *((self._output / name).read_text() for name in ("out", "err")))


def _live(arguments: tuple[str, ...], cwd: str, environment: dict[str, str], folder: Path) -> None:
    """Become what `python script.py …` would be there."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    ours = [name for name in sys.modules if name.partition(".")[0] in OURS]
    _forgotten.extend(sys.modules.pop(name) for name in ours)
    multiprocessing.current_process()._config["daemon"] = False  # its own: a command may start processes
    module = arguments[0] == "-m"
    sys.argv = list(arguments[module:])
    script = Path(sys.argv[0])
    sys.path[:0] = [cwd if module else str(script.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")
