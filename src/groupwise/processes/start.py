"""Starts the processes of a run on this machine, watches over them, and is what each of them does from start to end.

A process says how it ended through a pipe of its own before it leaves, and the others notice only when it has left, so
the first report is the cause and later ones are its consequences. A process that was killed says nothing. Torch comes
only with a process's work.
"""

from __future__ import annotations

import math
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import ProcessFailed, UserError, tell_warnings
from groupwise.processes.environment import Place, find_place, interrupt_on, name_of, silence, world_size

Work = Callable[[RunConfig, Place], dict[str, Any]]
GRACE = 5.0
"""Seconds that the others have to end by themselves when one has failed; then they are killed."""
LINES = 20
"""The last lines of stderr that are shown of a process that was killed."""


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
        return spawn(config)
    from groupwise.run import run

    return run(config)


def spawn(config: RunConfig, work: Work | None = None) -> dict[str, Any]:
    """Start all processes on this machine and watch over them to the end; see `start` for what it returns and raises.

    Args:
        work: what each does, a function at the top of a module, by default `run_here`; its result in the main process
            is returned.
    """
    world = world_size(config)
    members: list[_Member] = []
    with tempfile.TemporaryDirectory(prefix="groupwise-") as folder, _passed_on(members) as asked:
        try:
            for rank in range(world):
                place = Place(rank, world, rank, world, f"file://{folder}/meeting")
                members.append(_Member(config, place, work, Path(folder) / f"stderr-{rank}"))
            _watch(members)
        finally:
            for member in members:
                member.end()
        if asked:
            raise KeyboardInterrupt
        return _outcome(config, members)


@dataclass(frozen=True)
class Report:
    """A process's own report of how it ended."""

    kind: str
    """done, mistake, interrupted or crashed."""
    value: Any
    """The row of the main process; the mistake's sentence; the traceback."""
    when: float
    """Seconds on a clock that all processes of a machine share."""


class _Member:
    """A process and its report; only the main one writes to the terminal."""

    def __init__(self, config: RunConfig, place: Place, work: Work | None, said: Path) -> None:
        self.rank, self.said, self.killed_here = place.rank, said, False
        self.report: Report | None = None
        context = multiprocessing.get_context("spawn")
        self.receive, send = context.Pipe(duplex=False)  # for its report; the end of it is the end of the process
        said.touch()
        self.process = context.Process(target=_live, args=(config, place, work, send, said))
        self.process.start()
        send.close()

    def read(self) -> bool:
        """Take the report if there is one; true at the end of the process."""
        try:
            self.report = self.receive.recv()
        except EOFError:
            self.process.join()
            return True
        return False

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (None, 0)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.receive.close()


def _watch(members: Sequence[_Member]) -> None:
    """Wait until all have ended; when one has failed, the others have `GRACE` seconds."""
    deadline = math.inf
    running = {member.receive: member for member in members}
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            for member in running.values():
                member.killed_here = True
                member.process.kill()
        for ready in wait(list(running), None if left == math.inf else max(left, 1.0)):
            if running[ready].read():  # type: ignore[index]
                del running[ready]  # type: ignore[arg-type]
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
        f"the process of {name_of(config, first.rank)} failed with exit code {first.process.exitcode}, so all were "
        "stopped: fix the error above, then the same command resumes from the last checkpoint."
    )


def _killed(config: RunConfig, member: _Member) -> str:
    """The sentence for a process that ended without a report; prints its last lines."""
    if said := member.said.read_text(errors="replace").splitlines()[-LINES:]:
        print("\n".join(said), file=sys.stderr)
    code = member.process.exitcode or 0
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


def _live(config: RunConfig, place: Place, work: Work | None, send: Connection, said: Path) -> None:
    """Be one of the processes: work, send a `Report`, and leave; leave too when the process that watches has ended."""
    os.setsid()  # Ctrl-C goes to the process that watches, and from there to all
    threading.Thread(target=_end_with_parent, daemon=True).start()
    interrupt_on(signal.SIGTERM)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if not place.main:
        silence(sys.stdout)
        with open(said, "wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
        warnings.simplefilter("ignore", UserWarning)  # all would be warned of the same
    tell_warnings()
    code, kind = 0, "done"
    value: Any = None
    try:
        if work is None:
            from groupwise.processes import distributed  # brings torch

            work = distributed.run_here
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
    send.send(Report(kind, value, time.monotonic()))
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # of tqdm's semaphores
    os._exit(code)  # what is left of torch's threads is not waited for


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
