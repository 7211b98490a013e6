"""Starts the processes of a run on this machine by torch.multiprocessing, and reports what went wrong first.

A process writes how it ended into a file of its own before it leaves, and the others notice only when it has left, so
the first report is the cause and later ones are its consequences. A process that was killed says nothing. Torch comes
only with a process's work.
"""

from __future__ import annotations

import logging
import os
import pickle
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
from pathlib import Path
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import ProcessFailed, UserError, tell_warnings
from groupwise.processes.environment import Place, find_place, interrupt_on, name_of, silence, world_size

Work = Callable[[RunConfig, Place], dict[str, Any]]
GRACE = 5.0
"""Seconds that the others have to end by themselves when one has failed; then they are asked to, and at last killed."""


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
    import torch.multiprocessing as mp

    logging.getLogger(mp.spawn.__module__).setLevel(logging.ERROR)  # of processes that it ends
    with tempfile.TemporaryDirectory(prefix="groupwise-") as name:
        folder, failed = Path(name), None
        started = mp.start_processes(_live, (config, work, folder), world_size(config), join=False)
        assert started is not None
        with _passed_on(started.processes) as asked:
            try:
                while not started.join(grace_period=GRACE):
                    pass
            except mp.ProcessExitedException as error:
                failed = error
            finally:
                for process in started.processes:
                    process.kill()
        written = {int(file.name): file.read_bytes() for file in folder.glob("[0-9]*")}
    if asked:
        raise KeyboardInterrupt
    if failed is not None and failed.error_index not in written:
        raise ProcessFailed(_killed(config, failed.error_index, failed.exit_code))
    reports = {rank: pickle.loads(report) for rank, report in written.items()}  # noqa: S301 (of our own processes)
    return _outcome(config, reports)


@dataclass(frozen=True)
class Report:
    """A process's own report of how it ended."""

    kind: str
    """done, mistake, interrupted or crashed."""
    value: Any
    """The row of the main process; the mistake's sentence; the traceback."""
    when: float
    """Seconds on a clock that all processes of a machine share."""


def _outcome(config: RunConfig, reports: dict[int, Report]) -> dict[str, Any]:
    """The main process's row, or the exception for what went wrong first."""
    first = min(reports, key=lambda rank: (reports[rank].kind == "done", reports[rank].when))
    report = reports[first]
    if report.kind == "mistake":
        raise UserError(report.value)
    if report.kind == "interrupted":
        raise KeyboardInterrupt
    if report.kind == "crashed":
        print(report.value, file=sys.stderr, end="")
        raise ProcessFailed(
            f"the process of {name_of(config, first)} failed, so all were stopped: fix the error above, then the same "
            "command resumes from the last checkpoint."
        )
    return reports[0].value


def _killed(config: RunConfig, rank: int, code: int) -> str:
    """The sentence for a process that ended without a report."""
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    why = " (by the system, if memory ran out)" if code == -signal.SIGKILL else ""
    return (
        f"the process of {name_of(config, rank)} {how}{why}, so all were stopped: the same command goes on from the "
        "last checkpoint."
    )


@contextmanager
def _passed_on(processes: Sequence[Any]) -> Iterator[list[int]]:
    """A list that fills up when this process is asked to stop; all are asked too, and killed by a second Ctrl-C."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        again = number == signal.SIGINT in asked  # a cluster may say SIGTERM more than once
        asked.append(number)
        for process in processes:
            process.kill() if again else process.terminate()

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


def _live(rank: int, config: RunConfig, work: Work | None, folder: Path) -> None:
    """Be one of the processes: work, write a `Report`, and leave. Torch interrupts it when its parent has ended."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # one process shows progress; tqdm's own lock is a semaphore that a kill leaks
    os.setsid()  # Ctrl-C goes to the process that watches, and from there to all
    interrupt_on(signal.SIGTERM)
    interrupt_on(signal.SIGINT)  # which torch sends when the parent has ended, and nohup has ignored
    place = Place(rank, world_size(config), rank, world_size(config), f"file://{folder}/meeting")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if not place.main:
        silence(sys.stdout)
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
        kind = "interrupted"
    except BaseException:
        code, kind, value = 1, "crashed", traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    when = time.monotonic()
    (folder / f"{rank}").write_bytes(pickle.dumps(Report(kind, value, when)))
    os._exit(code)  # what is left of torch's threads is not waited for
