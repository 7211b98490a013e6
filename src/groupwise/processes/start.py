"""Starts the processes of a run on this machine with torch.multiprocessing, and reports the first failure.

Before it exits, each process writes to a file how it ended. The others notice only after it has exited, so the first
report is the cause, and later ones are consequences. A process that is killed writes no report. Torch is imported only
in the processes that work.
"""

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
"""Seconds that the other processes have to exit after one has failed. Then they get SIGTERM, and finally SIGKILL."""


def start(config: RunConfig) -> dict[str, Any]:
    """Run one configuration in the configured number of processes; returns the result row in the main process, else {}.

    Under torchrun or srun this process is one of them; otherwise this process starts them and watches.

    Raises:
        UserError: a mistake, reported once even if several processes found it.
        ProcessFailed: a process died or raised another exception; all others have been stopped.
        KeyboardInterrupt: the run was asked to stop, and all processes have written a checkpoint.
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
    """Start all processes on this machine and wait for them; returns and raises as `start`.

    Each process calls `work`, a function at the top level of a module; by default `run_here`.
    """
    import torch.multiprocessing as mp

    logging.getLogger(mp.spawn.__module__).setLevel(logging.ERROR)  # it would log the processes that it stops
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
    reports = {rank: pickle.loads(report) for rank, report in written.items()}  # noqa: S301 (from our own processes)
    if asked and all(report.kind != "mistake" for report in reports.values()):  # such as a full disk
        raise KeyboardInterrupt
    if failed is not None and failed.error_index not in written:
        raise ProcessFailed(_killed(config, failed.error_index, failed.exit_code))
    return _outcome(config, reports)


@dataclass(frozen=True)
class Report:
    """How a process ended, written by itself."""

    kind: str
    """done, mistake, interrupted or crashed."""
    value: Any
    """The row of the main process, the sentence of a mistake, or a traceback."""
    when: float
    """Seconds on the machine's monotonic clock."""


def _outcome(config: RunConfig, reports: dict[int, Report]) -> dict[str, Any]:
    """The row of the main process, or the exception for the first failure."""
    first = min(reports, key=lambda rank: (reports[rank].kind == "done", reports[rank].when))
    report = reports[first]
    if report.kind == "mistake":
        raise UserError(report.value)
    if report.kind == "interrupted":
        raise KeyboardInterrupt
    if report.kind == "crashed":
        print(report.value, file=sys.stderr, end="")
        raise ProcessFailed(
            f"the process of {name_of(config, first)} failed, so all were stopped: fix the error above; then the same "
            "command resumes from the last checkpoint."
        )
    return reports[0].value


def _killed(config: RunConfig, rank: int, code: int) -> str:
    """The sentence for a process that ended without a report."""
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    why = " (perhaps because memory ran out)" if code == -signal.SIGKILL else ""
    return f"the process of {name_of(config, rank)} {how}{why}, so all were stopped: the same command resumes the run."


@contextmanager
def _passed_on(processes: Sequence[Any]) -> Iterator[list[int]]:
    """Pass signals to stop on to the processes, and yield the list of them; a second Ctrl-C kills the processes."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        again = number == signal.SIGINT in asked  # a cluster may send SIGTERM more than once
        asked.append(number)
        for process in processes:
            process.kill() if again else process.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _live(rank: int, config: RunConfig, work: Work | None, folder: Path) -> None:
    """The main function of a process: work, write a `Report`, and exit. Torch interrupts it if its parent ends."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # only one process shows progress; a kill would leak tqdm's own semaphore
    os.setsid()  # Ctrl-C reaches the parent alone, which passes it on
    interrupt_on(signal.SIGTERM)
    interrupt_on(signal.SIGINT)  # torch sends it when the parent ends; nohup would ignore it
    place = Place(rank, world_size(config), rank, world_size(config), f"file://{folder}/meeting")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if not place.main:
        silence(sys.stdout)
        warnings.simplefilter("ignore", UserWarning)  # all processes would print the same warnings
    tell_warnings()
    code, kind = 0, "done"
    value: Any = None
    try:
        if work is None:
            from groupwise.processes import distributed  # imports torch

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
    (folder / f"{rank}").write_bytes(pickle.dumps(Report(kind, value, time.monotonic())))
    os._exit(code)  # without waiting for torch's threads
