"""A process of run.py that faults are tried on, and the result of a finished run.

Processes are forked from this one, which has imported torch, and execute run.py as the command line does. With `fresh`
they start a new Python.
"""

import hashlib
import json
import os
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

from trust.forked import fork

RUN = Path(__file__).resolve().parents[2] / "run.py"
STEPS = 24
SEEDED = ("clip=adaptive_layer", "debug.noise_seed=5")
"""Noise from a seed, so that also runs that were refused before their first step end with the same bits."""
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
    said: Path
    code: int | None = None
    """Exit code, or minus the signal that ended it."""
    halted: bool = False

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self.halted = True
            elif pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def standing(self) -> bool:
        """Whether `halting` has stopped it."""
        return self.halted

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
        return self.said.with_suffix(".err").read_text()

    def refused(self) -> bool:
        """Whether it ended with one sentence and exit code 2."""
        sentences = [line for line in self.errors.splitlines() if line.startswith("error: ")]
        return self.wait() == 2 and len(sentences) == 1 and "Traceback" not in self.errors


def start(
    results: Path,
    *overrides: str,
    before: Callable[[], Any] | None = None,
    fresh: bool = False,
    said: Path | None = None,
    small: Sequence[str] = SMALL,
) -> Process:
    """Start `run.py` with `SMALL` and more settings.

    Args:
        results: its paths.results, made here.
        before: called in the new process first; it has no effect on this one.
        fresh: a new Python instead of a fork of this one.
        said: its output goes to <said>.out and .err; by default beside the results.
        small: other settings than `SMALL`.
    """
    results.mkdir(parents=True, exist_ok=True)
    warm()
    said = (said or results).with_suffix(".out")
    given = {each.partition("=")[0]: each for each in (*small, f"paths.results={results}", *overrides)}
    arguments = [str(RUN), *given.values()]

    def live() -> None:
        if before is not None:
            before()
        if fresh:
            os.execv(sys.executable, [sys.executable, *arguments])
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

    return Process(fork(live, said, said.with_suffix(".err")), said)


def complete(results: Path, *overrides: str, **options: Any) -> Process:
    """`start`, and wait for the end."""
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
    """How many lines metrics.jsonl has: one for each step, and one for the last evaluation."""
    metrics = run_folder(results) / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def halting(last: int) -> Callable[[], None]:
    """For a new process: a function that makes the run stop itself after it has logged step `last`, until SIGCONT.

    Another process might send a signal too late on a busy machine, when the run is done.
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


def left(results: Path) -> dict[str, Any]:
    """The results of a finished run that must not depend on faults: weights, thresholds, plan, ε and metrics.

    Raises:
        FileNotFoundError: it is not finished.
        ValueError: it has left a checkpoint.
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
    return left(work / "whole")


def same(results: Path, expected: dict[str, Any]) -> bool:
    """Whether the run in `results` has ended as expected; prints differences on stderr."""
    try:
        found = left(results)
    except (OSError, ValueError) as error:
        print(f"lost: {results}: {error}", file=sys.stderr)
        return False
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        print(f"lost: {results}: other {', '.join(wrong)} than undisturbed", file=sys.stderr)
    return not wrong
