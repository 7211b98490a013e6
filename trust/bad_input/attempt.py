"""Runs one command line of run.py in its own process and folder, and judges its outcome."""

import hashlib
import importlib.util
import math
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trust.forked import fork

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}
"""Audit events whose first argument is the path of a changed file."""
TWO_PATHS = {"os.rename", "os.link", "os.symlink"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
MAY_START = {"git", "uname"}
"""Programs that a run may start, to record the commit and the machine."""


def watch(allowed: Sequence[Path], report: Path) -> None:
    """From now on, write to `report` each change of a file outside of `allowed` and each started program that is not in
    `MAY_START`; refuse each network connection with an `OSError`.

    It is an audit hook of Python, so files that C libraries open themselves (torch's zip writer) are not seen.
    """
    homes = tuple(f"{path.resolve()}{os.sep}" for path in allowed)
    note = os.open(report, os.O_WRONLY | os.O_APPEND)

    def inside(path: Any, itself: bool) -> bool:
        if isinstance(path, int) or path is None:
            return True
        folder, name = os.path.split(path := os.fsdecode(path))
        real = os.path.join(os.path.realpath(folder), name) if itself else os.path.realpath(path)
        return f"{real}{os.sep}".startswith((*homes, "/dev/null", "/dev/shm/", f"/proc/{os.getpid()}/"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in NETWORK:
            if event == "socket.connect" and isinstance(args[1], str | bytes):
                return  # a local socket
            raise OSError(f"the network is cut here ({event})")
        changed: Sequence[Any] = ()
        if event == "open":
            _, mode, flags = args
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & WRITING):
                changed = args[:1]
        elif event in CHANGES:
            changed = args[: 2 if event in TWO_PATHS else 1]
        elif event in PROGRAMS:
            program = args[0] if event != "subprocess.Popen" else args[1][0]
            if Path(os.fsdecode(program)).name not in MAY_START:
                os.write(note, f"{event} {args!r}\n".encode(errors="replace"))
        for path in changed:
            if not inside(path, event != "open"):
                os.write(note, f"{event} {os.fsdecode(path)}\n".encode(errors="replace"))

    sys.addaudithook(hook)


ROOT = Path(__file__).resolve().parents[2]
MEMORY = 4 << 30
"""Bytes that an attempt may use beyond the memory of the process that it is forked from."""
WAIT = 5
"""The limit of an attempt's wall time, as a multiple of its limit of CPU time."""
SHORT = 32 << 20
"""Larger files are compared by size and modification time, not by content."""
LONGEST = 600
"""The most characters of a refusal; a longer one does not count as one sentence."""
PROVENANCE = ("config.yaml", "config.hash", "command.txt", "git.json", "environment.json", "diff.patch", ".lock")


def is_sentence(errors: str) -> bool:
    """Whether an output on stderr is one line `error: …` of at most `LONGEST` characters."""
    return bool(re.fullmatch(r"error: [^\n]+\n", errors)) and len(errors) <= LONGEST


def words(*lines: str) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(" ".join(lines).split())


@dataclass(frozen=True)
class Attempt:
    """A command line to try.

    Attributes:
        kind: the row of the table.
        arguments: of run.py.
        prepare: makes files in the attempt's folder, which is the current one.
        environment: additional environment variables.
        trains: run an accepted configuration, rather than stop after its check.
    """

    kind: str
    arguments: Sequence[str]
    prepare: Callable[[Path], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    trains: bool = False


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Attributes:
        verdict: ran, accepted (only checked), refused, stopped (at the limit of CPU time), or a defect: traceback,
            talkative (more than one sentence), silent (no run), partial (a refused run left files, or a folder has no
            DONE), outside (a file was written elsewhere), hung (still running at the limit of wall time).
        output: stderr, or a description of the defect.
    """

    attempt: Attempt
    verdict: str
    output: str


DEFECTS = ("traceback", "talkative", "silent", "partial", "outside", "hung")


def attempt_all(attempts: Sequence[Attempt], patience: float, workers: int) -> Iterator[Outcome]:
    """Run all attempts, `workers` at a time; yields outcomes as they end. Each attempt has `patience` seconds of CPU
    time, and `WAIT` times as long in wall time.

    The calling process must have only one thread, as it forks.
    """
    waiting = list(reversed(attempts))
    running: dict[int, tuple[Attempt, Path, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                folder = Path(tempfile.mkdtemp(prefix="groupwise-bad-input-"))
                attempt = waiting.pop()
                running[_begin(attempt, folder, patience)] = (attempt, folder, time.monotonic())
            time.sleep(0.002)
            for pid, (attempt, folder, began) in list(running.items()):
                seconds = time.monotonic() - began
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and seconds < WAIT * patience:
                    continue
                if not ended:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                del running[pid]
                code = os.waitstatus_to_exitcode(status) if ended else None
                verdict, output = judge(attempt, folder, code)
                shutil.rmtree(folder, ignore_errors=True)
                yield Outcome(attempt, verdict, output)
    finally:
        for pid, (_, folder, _) in running.items():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shutil.rmtree(folder, ignore_errors=True)


def judge(attempt: Attempt, folder: Path, code: int | None) -> tuple[str, str]:
    """The verdict on an attempt that ended with `code` (None: killed at the wall limit), and its output."""
    errors = (folder / "stderr").read_text(errors="replace")
    outside = (folder / "outside").read_text(errors="replace")
    if outside or any(folder.rglob("UNPICKLED")):
        return "outside", outside or "the code of a file was run"
    if "Traceback (most recent call last)" in errors or code not in (0, 2, None, -signal.SIGXCPU):
        return "traceback", f"exit code {code}\n{errors}"
    left = _changes(folder)
    if code in (None, -signal.SIGXCPU):
        return "stopped" if code else "hung", errors
    if code == 2:
        if not is_sentence(errors):
            return "talkative", errors
        return ("partial", f"{' '.join(left)}\n{errors}") if left else ("refused", errors)
    runs = list((folder / "work" / "results" / "runs").glob("*"))
    if unfinished := [run.name for run in runs if not (run / "DONE").is_file()]:
        return "partial", f"no DONE in {unfinished}\n{errors}"
    if not attempt.trains:
        return "accepted", errors
    shows = any(part.startswith("-") or "explain" in part for part in attempt.arguments)
    return ("ran" if runs or shows else "silent"), errors


def _begin(attempt: Attempt, folder: Path, patience: float) -> int:
    """Start an attempt; returns its process id, which is also its process group."""
    work = folder / "work"
    for name in ("work", "tmp"):
        (folder / name).mkdir()
    if attempt.prepare is not None:
        attempt.prepare(work)
    (folder / "before").write_text("\n".join(_files(work)))
    (folder / "outside").touch()
    return fork(partial(_run, attempt, folder, patience), folder / "stdout", folder / "stderr")


def _run(attempt: Attempt, folder: Path, patience: float) -> int:
    """In the forked process: enter its folder, set limits, install `watch`, and run `run.main`."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds := math.ceil(time.process_time() + patience), seconds + 5))
    os.setsid()
    os.chdir(folder / "work")
    os.environ.update(attempt.environment)
    sys.argv = ["run.py", *attempt.arguments]
    tempfile.tempdir = str(folder / "tmp")
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").is_file() else 0
    if pages:
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.dont_write_bytecode = True  # cached bytecode beside the source would count as a change
    watch((folder, Path(os.environ["GROUPWISE_CACHE"])), folder / "outside")
    program = load_program()
    if attempt.trains:
        return program.main()
    from groupwise.cli.main import launch

    return launch(program.CONF, lambda config: None)


def load_program():  # type: ignore[no-untyped-def]
    """run.py as a module."""
    spec = importlib.util.spec_from_file_location("groupwise_run", ROOT / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _files(work: Path) -> list[str]:
    """A line for each file and folder in `work`: its name and a fingerprint."""
    found = []
    for folder, folders, files in os.walk(work):
        for name in (*folders, *files):
            path = Path(folder, name)
            found.append(f"{path.relative_to(work)} {_fingerprint(path)}")
    return sorted(found)


def _fingerprint(path: Path) -> str:
    """A hash of a file's content, or size and time of a large one; the type of anything else."""
    at = path.lstat()
    if not stat.S_ISREG(at.st_mode):
        return oct(stat.S_IFMT(at.st_mode))
    if at.st_size > SHORT:
        return f"{at.st_size} {at.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _changes(folder: Path) -> list[str]:
    """Files that a refused run created, changed or removed; a resumed run may rewrite its provenance."""
    before = set((folder / "before").read_text().split("\n")) - {""}
    changed = before ^ set(_files(folder / "work"))
    if any("/config.yaml " in line for line in before):
        return sorted(line for line in changed if not line.partition(" ")[0].endswith(PROVENANCE))
    return sorted(changed)
