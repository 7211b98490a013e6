"""A job of a cluster is stopped before it is done: what the job does then, and the batch script around it.

USR2 is SLURM's warning before the time limit, and what `scancel -s USR2` sends. In the job it does what SIGTERM does
everywhere here: the run finishes its step, writes its checkpoint and leaves with exit code 130. The batch script, which
the warning does not reach, puts the job back into the queue then, and as well when the job was killed: an exit code
above 128 is a signal's. A job that ended by itself, well or badly, stays as it is, and one that was cancelled too, as
SLURM then ends the batch script first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from groupwise.launch.outcome import INTERRUPTED
from groupwise.launch.worker import interrupt_on

MARGIN = 0.25
"""Share of the time between the warning and the limit that is kept for leaving and for the batch script."""


def heed_warnings(seconds: float) -> None:
    """From now on, in this process: stop on USR2 and SIGTERM as on Ctrl-C, and in time.

    Args:
        seconds: between the warning and the end. A run that has not left by then, less `MARGIN`, is ended as it is,
            so that the job is put back rather than lost: it then goes on from the checkpoint before.
    """
    interrupt_on(signal.SIGTERM)  # until the run has a handler of its own
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside of a long operation
    warned = False

    def warn(_: int, __: Any) -> None:
        nonlocal warned
        if not warned:
            warned = True
            signal.alarm(max(1, round(seconds * (1 - MARGIN))))
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, warn)


def in_job(work: Callable[[], Any], seconds: float) -> Any:
    """Do the work of a task of a job; where it is interrupted, leave with the exit code that puts the job back."""
    heed_warnings(seconds)
    try:
        return work()
    except KeyboardInterrupt:
        job = os.environ.get("SLURM_JOB_ID", "")
        print(f"interrupted: job {job} can go on from its last checkpoint", flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.alarm(0)


def put_back(restarts: int) -> list[str]:
    """Lines of the batch script after srun's, for bash. A task of an array is named so: the array's number means all.

    Args:
        restarts: how often a job may start again in all, whoever put it back.
    """
    return [
        "code=$?",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        'if [ "$code" -gt 128 ]; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then',
        f'    echo "error: job $job was stopped (exit code $code) after {restarts} restarts, and stays as it is" >&2',
        "  else",
        '    echo "job $job was stopped (exit code $code) and goes back into the queue" >&2',
        '    for pause in 5 30 60; do scontrol requeue "$job" && break; sleep $pause; done',
        "  fi",
        "fi",
        "exit $code",
    ]
