"""A copy of the sources and tests, and processes that run pytest on it.

Each mutant runs in a process forked from one that has torch and its like loaded, and forgets what that had of
`groupwise`: so the mutated file is imported as any other, decorators, class bodies and module level included.
"""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

OURS = ("groupwise", "trust", "conftest", "tests", "test_", "__main__", "coverage")


class Sandbox:
    """A folder with `src/` and `tests/`."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.source = folder / "src" / "groupwise"
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / "src", folder / "src", ignore=leave)
        shutil.copytree(checkout / "tests", folder / "tests", ignore=leave)
        shutil.copy(checkout / "pyproject.toml", folder / "pyproject.toml")
        self.clock = int(time.time())

    def write(self, file: Path, text: str) -> None:
        """Write a source file under a new time stamp, so that no compiled copy of it is taken for it."""
        self.clock += 2
        file.write_text(text)
        os.utime(file, (self.clock, self.clock))

    def run(
        self, arguments: list[str], plugin: Callable[[], object], log: Path, cpu: float, cache: Path, write: bool
    ) -> str:
        """Run pytest in a child; "passed", "failed", "timeout" (``cpu`` seconds), or "broken"."""
        child = os.fork()
        if child == 0:
            self._child(arguments, plugin, log, cpu, cache, write)
        deadline = time.monotonic() + 60 + 20 * cpu
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout"
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what a test may have started and left
        if os.WIFSIGNALED(status):
            return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "failed"
        return {0: "passed", 1: "failed"}.get(os.WEXITSTATUS(status), "failed")

    def _child(
        self, arguments: list[str], plugin: Callable[[], object], log: Path, cpu: float, cache: Path, write: bool
    ) -> None:
        code = 3
        try:
            os.setpgid(0, 0)  # killed as one; a session of its own would lose the caller's priority
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            limit = int(time.process_time() + cpu) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.dont_write_bytecode = not write
            os.environ.update(
                PYTHONPATH=str(self.folder / "src"), GROUPWISE_CACHE=str(cache), HYPOTHESIS_STORAGE_DIRECTORY=str(cache)
            )
            os.chdir(self.folder)
            for name in [name for name in sys.modules if name.split(".")[0] == "groupwise"]:
                del sys.modules[name]  # what this module's caller needs for itself is of the checkout, without mistake
            sys.path[:] = [str(self.folder / "src"), *(p for p in sys.path if Path(p or ".").name != "src")]
            import pytest

            chosen = plugin()
            code = int(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-m", "not slow"], plugins=[chosen]))
            if hasattr(chosen, "save"):
                chosen.save(self.folder / "coverage.json")
                (self.folder / "modules.txt").write_text("\n".join(n for n in sys.modules if not n.startswith(OURS)))
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)


def warm_up(names: Iterable[str]) -> None:
    """Import what the tests import, except the code under test; no thread may be left running, or no fork is safe."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    assert not others, others
