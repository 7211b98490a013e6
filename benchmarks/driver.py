"""Measures each method on one workload separately, then times all methods in interleaved rounds."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.job import Job
from benchmarks.methods import SUMS_OF, formats, is_peer
from benchmarks.process import Process
from benchmarks.workloads import WORKLOADS
from groupwise.errors import UserError

SAME_SUMS = 1e-3  # relative; float32 sums of the same method in two memory formats differ by far less

Start = Callable[[Job, float], Any]
"""Starts a job with a time limit in seconds; returns a context manager that answers requests, such as `Process`."""


@dataclass(frozen=True)
class Measured:
    """A job, and what its process answered to `measure`, or why it cannot run."""

    job: Job
    facts: dict[str, Any]

    @property
    def refused(self) -> str | None:
        """Why the job does not run, or None."""
        return self.facts.get("refused")


def run(
    case: Job,
    methods: Sequence[str],
    rounds: int,
    steps: int,
    limit: float,
    start: Start = Process,
    until: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Rows of one workload: one for each method, format and round, or a single one if the method does not run.

    Args:
        case: workload, sizes, device; its method and format are ignored.
        methods: names from `METHODS`, `none` first.
        rounds: timed rounds of each method.
        steps: timed steps of a round.
        limit: seconds that one measurement or round of a method may take.
        start: starts a job.
        until: called between methods and rounds; True ends the measurement early.

    Raises:
        UserError: plain training itself does not run, so there is nothing to compare with.
    """
    chosen: list[Measured] = []
    for method in methods:
        if chosen and until():
            break
        progress(f"{case.workload}: memory and operations of {method}")
        jobs = [
            replace(case, method=method, memory_format=memory_format)
            for memory_format in formats(method, WORKLOADS[case.workload].channels_last)
        ]
        measured = [_measure(job, limit, start) for job in jobs]
        if method == "none" and all(one.refused for one in measured):
            raise UserError(f"workload={case.workload} does not run here without clipping: {measured[0].refused}.")
        if method == "none":  # all methods have the sizes that the workload has by default
            facts = next(one.facts for one in measured if not one.refused)
            sizes = {"batch": facts["batch"], "layers": facts["layers"]}
            case = replace(case, **sizes)
            measured = [Measured(replace(one.job, **sizes), one.facts) for one in measured]
        chosen += [_faster(measured)] if is_peer(method) else measured
    return _rounds(_sound(chosen), rounds, steps, limit, start, until)


def _measure(job: Job, limit: float, start: Start) -> Measured:
    with start(job, limit) as process:
        return Measured(job, process.ask(do="measure"))


def _faster(formats: list[Measured]) -> Measured:
    """The faster format of a peer, among those in which its clipped sums are the same as with contiguous images."""
    first = formats[0]
    running = [
        candidate
        for candidate in formats
        if not candidate.refused
        and (first.refused or abs(candidate.facts["sums"] / first.facts["sums"] - 1) < SAME_SUMS)
    ]
    return min(running, key=lambda candidate: candidate.facts["seconds"], default=first)


def _sound(chosen: list[Measured]) -> list[Measured]:
    """Mark as refused each peer whose clipped sums differ from those of our method with the same groups."""
    ours = {one.job.method: one.facts["sums"] for one in chosen if not one.refused}
    kept = []
    for one in chosen:
        truth = ours.get(SUMS_OF.get(one.job.method, ""))
        if truth and not one.refused and abs(difference := one.facts["sums"] / truth - 1) >= SAME_SUMS:
            wrong = f"the norm of its clipped sums is {difference:+.1%} off"
            one = Measured(one.job, {"refused": wrong, "peer": one.facts.get("peer")})
        kept.append(one)
    return kept


def _rounds(
    chosen: list[Measured], rounds: int, steps: int, limit: float, start: Start, until: Callable[[], bool]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = [(one, stack.enter_context(start(one.job, limit))) for one in chosen if not one.refused]
        for number in range(rounds):
            if rows and until():
                break
            for one, process in list(running):
                progress(f"{one.job.workload}: round {number + 1} of {rounds}, {one.job.method}")
                answer = process.ask(do="round", steps=steps)
                rows.append(row_of(one, number, steps, answer))
                if "refused" in answer:
                    running.remove((one, process))
    return rows + [row_of(one, 0, 0, {}) for one in chosen if one.refused]


def row_of(one: Measured, number: int, steps: int, answer: dict[str, Any]) -> dict[str, Any]:
    """A row: the facts about a job, and its answer in a round of `steps` steps."""
    job, facts = one.job, one.facts
    refused = one.refused or answer.get("refused")
    # One thread on a shared processor: its CPU time is the wall time that it would take on an idle one.
    clock = "cpu_seconds" if job.device == "cpu" and job.threads == 1 else "wall_seconds"
    seconds = answer.get(clock)
    return {
        "workload": job.named,
        "method": job.method,
        "memory_format": job.memory_format,
        "batch": job.batch,
        "layers": job.layers,
        "parameters": facts.get("parameters"),
        "device": job.device,
        "threads": job.threads,
        "dtype": job.dtype,
        "round": number,
        "steps": steps,
        "cpu_seconds": answer.get("cpu_seconds"),
        "wall_seconds": answer.get("wall_seconds"),
        "noise_seconds": answer.get("noise_seconds"),
        "examples_per_second": job.batch / seconds if seconds and job.batch else None,
        "peak_bytes": facts.get("peak_bytes"),
        "flops": facts.get("flops"),
        "status": f"refused: {refused}" if refused else "ok",
        "peer": facts.get("peer"),
    }


def progress(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)
