"""Starts the processes of a run on this machine, watches over them, and is what each of them does from start to end.

A process says how it ended through a pipe of its own before it leaves, and the others notice only when it has left, so
the first report is the cause and later ones are its consequences. A process that was killed says nothing. Torch comes
only with a process's work.
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import ProcessFailed, UserError, tell_warnings
from groupwise.processes.environment import Place, find_place, interrupt_on, name_of, world_size

Work = Callable[[RunConfig, Place], dict[str, Any]]
GRACE = 5.0
"""Seconds that the others have to end by themselves when one has failed; then they are killed."""
LINES = 20
"""Of what a process that was killed said last."""


def start(config: RunConfig) -> dict[str, Any]:
    """Run one cell, in as many processes as it asks for; returns its result row (empty but in the main process).

    Under torchrun or srun this process is one of them; otherwise they are started here, and this one watches.

    Raises:
        UserError: a mistake, reported once, whichever processes found it.
        ProcessFailed: a process died, or hit a bug; no other is left.
        KeyboardInterrupt: asked to stop, after a checkpoint that all agreed on.
    """
    place = find_place(config)
    if place is not None and place.world > 1:
        from groupwise.processes.distributed import join

        return join(config, place)
    if world_size(config) > 1:
        return spawn(config, run_here)
    from groupwise.run import run

    return run(config)


def spawn(config: RunConfig, work: Work) -> dict[str, Any]:
    """Start all processes on this machine and watch over them to the end; see `start` for what it returns and raises.

    Args:
        work: what each does, a function at the top of a module; its result in the main process is returned.
    """
    world = world_size(config)
    members: list[_Member] = []
    with tempfile.TemporaryDirectory(prefix="groupwise-") as folder, _passed_on(members) as asked:
        try:
            for rank in range(world):
                place = Place(rank, world, rank, world, f"file://{folder}/meeting")
                members.append(_Member.start(config, place, work, Path(folder) / f"stderr-{rank}"))
            _watch(members)
        finally:
            for member in members:
                member.end()
        if asked:
            raise KeyboardInterrupt
        return _outcome(config, members)


@dataclass
class _Member:
    """A process, and what is known of its end."""

    rank: int
    process: subprocess.Popen[bytes]
    receive: int
    """Where its report comes in; the end of it is the end of the process."""
    said: Path
    heard: bytes = b""
    killed_here: bool = False

    @classmethod
    def start(cls, config: RunConfig, place: Place, work: Work, said: Path) -> _Member:
        """Start a process; only the main one is heard."""
        receive, send = os.pipe()
        with open(said, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", "from groupwise.processes.start import live; live()", str(send)],
                stdin=subprocess.PIPE,
                stdout=None if place.main else subprocess.DEVNULL,
                stderr=None if place.main else file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(send,),
                start_new_session=True,  # Ctrl-C goes to the process that watches, and from there to all
            )
        os.close(send)
        assert process.stdin is not None
        with suppress(OSError):  # it is gone already, as will be seen
            process.stdin.write(pickle.dumps((config, place, work)))
            process.stdin.flush()  # and left open: its end tells the process that it is alone
        return cls(place.rank, process, receive, said)

    def read(self) -> bool:
        """Take what has come in; true at its end."""
        part = os.read(self.receive, 1 << 16)
        self.heard += part
        if not part:
            self.process.wait()
        return not part

    @property
    def report(self) -> Report | None:
        if not self.heard or self.process.returncode is None:
            return None
        return pickle.loads(self.heard)  # noqa: S301 (from a pipe of this process's own child)

    @property
    def failed(self) -> bool:
        return self.process.returncode not in (None, 0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.receive)
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]


def _watch(members: Sequence[_Member]) -> None:
    """Wait until all have ended; when one has failed, the others have `GRACE` seconds."""
    deadline = math.inf
    with selectors.DefaultSelector() as running:
        for member in members:
            running.register(member.receive, selectors.EVENT_READ, member)
        while running.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                for key in running.get_map().values():
                    key.data.killed_here = True
                    key.data.process.kill()
            for key, _ in running.select(None if left == math.inf else max(left, 1.0)):
                if key.data.read():
                    running.unregister(key.fileobj)
            if deadline == math.inf and any(member.failed for member in members):
                deadline = time.monotonic() + GRACE


def _outcome(config: RunConfig, members: Sequence[_Member]) -> dict[str, Any]:
    """The main process's row, or the exception for what went wrong first."""
    failed = [member for member in members if member.failed and not member.killed_here]
    for member in failed:
        if member.report is None:
            raise ProcessFailed(_killed(config, member))
    if not failed:
        report = members[0].report
        assert report is not None
        return report.value
    first = min(failed, key=lambda member: member.report.when)  # type: ignore[union-attr]
    report = first.report
    assert report is not None
    if report.kind == "mistake":
        raise UserError(report.value)
    if report.kind == "interrupted":
        raise KeyboardInterrupt
    print(report.value, file=sys.stderr, end="")
    raise ProcessFailed(
        f"the process of {name_of(config, first.rank)} failed with exit code {first.process.returncode}, so all were "
        "stopped: fix the error above, then the same command resumes from the last checkpoint."
    )


def _killed(config: RunConfig, member: _Member) -> str:
    """How a process ended that could not say so itself; and what it said last."""
    if said := member.said.read_text(errors="replace").splitlines()[-LINES:]:
        print("\n".join(said), file=sys.stderr)
    code = member.process.returncode
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    why = " (by the system, if memory ran out)" if code == -signal.SIGKILL else ""
    return (
        f"the process of {name_of(config, member.rank)} {how}{why}, so all were stopped: the same command goes on from "
        "the last checkpoint."
    )


@contextmanager
def _passed_on(members: Sequence[_Member]) -> Iterator[list[int]]:
    """A list that fills up when this process is asked to stop; all are asked too, and killed by a second Ctrl-C."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        again = number == signal.SIGINT in asked  # a cluster may say SIGTERM more than once
        asked.append(number)
        for member in members:
            member.process.kill() if again else member.process.terminate()

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Report:
    """How a process ended, as it says itself."""

    kind: str
    """done, mistake, interrupted or crashed."""
    value: Any
    """The row of the main process; the mistake's sentence; the traceback."""
    when: float
    """Seconds on a clock that all processes of a machine share."""


def run_here(config: RunConfig, place: Place) -> dict[str, Any]:
    """`groupwise.processes.distributed.run_here`, which brings torch."""
    from groupwise.processes import distributed

    return distributed.run_here(config, place)


def live() -> None:
    """Take (config, place, work) from stdin, work, write a `Report` to the file descriptor in the argument, and leave.

    The end of stdin is the end of the process that watches, and then this one leaves too.
    """
    send = int(sys.argv[1])
    os.set_inheritable(send, False)
    config, place, work = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the process that started this one)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    interrupt_on(signal.SIGTERM)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if not place.main:
        warnings.simplefilter("ignore", UserWarning)  # all would be warned of the same
    tell_warnings()
    code, kind = 0, "done"
    value: Any = None
    try:
        row = work(config, place)
        value = row if place.main else {}
    except UserError as error:
        code, kind, value = 2, "mistake", str(error)
    except KeyboardInterrupt:
        code, kind = 130, "interrupted"
    except BaseException:
        code, kind, value = 1, "crashed", traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(send, "wb") as report:
        pickle.dump(Report(kind, value, time.monotonic()), report)
        report.flush()
        os._exit(code)  # what is left of torch's threads is not waited for


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
