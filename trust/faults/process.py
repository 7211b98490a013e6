"""Starts processes of run.py for the fault tests, and compares the results of finished runs.

Processes are forked from this one, which has imported torch, and execute run.py as the command line does. With `fresh`
they start a new Python.
"""

import hashlib
import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trust.bad_input.attempt import is_sentence
from trust.forked import fork

RUN = Path(__file__).resolve().parents[2] / "run.py"
STEPS = 24
SEEDED = ("clip=adaptive_layer", "debug.noise_seed=5")
"""Noise from a seed, so that a run that was refused before its first step also ends with the same bits."""
SMALL = (
    "task=cifar",
    "scale=smoke",
    "data.train_limit=96",
    "eval.train_limit=32",
    "eval.batch_size=64",
    "train.batch_size=16",
    "train.microbatch=8",
    f"train.steps={STEPS}",
    "train.checkpoint_every=0",
    "clip.formula=materialize",
    "privacy.accountant=rdp",
)
"""A run of a second or two that writes a checkpoint after every step."""
LONGEST = 600.0
"""Seconds until a run counts as stuck."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    fault: str
    tried: int
    lost: int
    """Trials in which the run did not end as the undisturbed one, or something else went wrong."""
    result: str


@dataclass
class Process:
    """A process of run.py; its output goes to files beside its results."""

    pid: int
    output: Path
    code: int | None = None
    """Exit code, or minus the signal that ended it."""
    stopped: bool = False

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self.stopped = True
            elif pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def is_stopped(self) -> bool:
        """Whether `stop_after` has stopped the process."""
        return self.stopped

    def wait(self) -> int:
        """The exit code."""
        end = time.monotonic() + LONGEST
        while self.running():
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> bool:
        """Send a signal; returns whether it was still running."""
        if not self.running():
            return False
        os.kill(self.pid, number)
        return True

    @property
    def errors(self) -> str:
        """Its output on stderr."""
        return self.output.with_suffix(".err").read_text()

    def refused(self) -> bool:
        """Whether it ended with a one-sentence error, after any progress bar and warnings, and exit code 2."""
        rest = re.sub(r"^(warning: .*|.*%\|.*|)\n", "", self.errors, flags=re.MULTILINE)
        return self.wait() == 2 and is_sentence(rest)


def start(
    results: Path,
    *overrides: str,
    before: Callable[[], Any] | None = None,
    fresh: bool = False,
    output: Path | None = None,
    small: Sequence[str] = SMALL,
) -> Process:
    """Start `run.py` with `SMALL` and more settings.

    Args:
        results: its paths.results, created here.
        before: called first in the new process.
        fresh: start a new Python instead of a fork of this process.
        output: write its output to <output>.out and .err; by default beside the results.
        small: settings in place of `SMALL`.
    """
    results.mkdir(parents=True, exist_ok=True)
    warm()
    output = (output or results).with_suffix(".out")
    given = {each.partition("=")[0]: each for each in (*small, f"paths.results={results}", *overrides)}
    arguments = [str(RUN), *given.values()]

    def live() -> None:
        if before is not None:
            before()
        if fresh:
            os.execv(sys.executable, [sys.executable, *arguments])
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

    return Process(fork(live, output, output.with_suffix(".err")), output)


def complete(results: Path, *overrides: str, **options: Any) -> Process:
    """Call `start` and wait for the end of the process."""
    process = start(results, *overrides, **options)
    process.wait()
    return process


@cache
def warm() -> None:
    """Import what every forked run needs; on one thread, as a pool of threads does not survive a fork."""
    import sklearn.datasets  # noqa: F401
    import torch._dynamo

    import groupwise.cli.main
    import groupwise.processes.start
    import groupwise.run
    import groupwise.tasks  # noqa: F401

    torch.set_num_threads(1)


def run_folder(results: Path) -> Path:
    """The folder of the only run, or a path that does not exist."""
    return next((results / "runs").glob("*"), results / "runs" / "none")


def logged(results: Path) -> int:
    """The number of lines in metrics.jsonl: one for each step, and one for the last evaluation."""
    metrics = run_folder(results) / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def stop_after(last: int) -> Callable[[], None]:
    """A function for the new process: the run stops itself (until SIGCONT) after it has logged step `last`.

    On a busy machine, a signal from another process might arrive only after the end of the run.
    """

    def halt() -> None:
        from groupwise.training.record import RunRecord

        log = RunRecord.log

        def log_and_halt(self: RunRecord, step: int, metrics: Mapping[str, Any]) -> None:
            log(self, step, metrics)
            if step == last:
                os.kill(os.getpid(), signal.SIGSTOP)

        RunRecord.log = log_and_halt  # type: ignore

    return halt


def wait_for(process: Process, happened: Callable[[], bool]) -> bool:
    """Wait until `happened()` is true; returns False if the process ended before."""
    while process.running():
        if happened():
            return True
        time.sleep(0.0005)
    return False


def result_of(results: Path) -> dict[str, Any]:
    """The results of a finished run that must not depend on faults: weights, thresholds, plan, ε and metrics.

    Raises:
        FileNotFoundError: the run is not finished.
        ValueError: a checkpoint is left in its folder.
    """
    folder = run_folder(results)
    if not (folder / "DONE").is_file():
        raise FileNotFoundError(f"no finished run in {results}")
    if keys := [*folder.glob("checkpoint*"), *folder.glob(".*.partial")]:
        raise ValueError(f"{keys[0].name} may hold the key of the noise")
    model = torch.load(folder / "model.pt", weights_only=True)
    weights = hashlib.sha256(b"".join(model[name].numpy().tobytes() for name in sorted(model))).hexdigest()
    privacy = json.loads((folder / "privacy.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    kept = {key: privacy[key] for key in ("plan", "thresholds", "spent", "executed_steps")}
    return {"weights": weights, "metrics": metrics, **kept}


def undisturbed(work: Path, *settings: str) -> dict[str, Any]:
    """The results of a seeded run that nothing disturbs."""
    complete(work / "whole", *SEEDED, *settings)
    return result_of(work / "whole")


def same(results: Path, expected: dict[str, Any]) -> bool:
    """Whether the run in `results` ended with the expected results; prints differences on stderr."""
    try:
        found = result_of(results)
    except (OSError, ValueError) as error:
        print(f"lost: {results}: {error}", file=sys.stderr)
        return False
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        print(f"lost: {results}: other {', '.join(wrong)} than undisturbed", file=sys.stderr)
    return not wrong
