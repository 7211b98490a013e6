"""Lives the life of a process that another one started and watches over; torch comes only with its work."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, tell_warnings
from groupwise.processes.environment import Place, interrupt_on

Work = Callable[[RunConfig, Place], dict[str, Any]]


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
