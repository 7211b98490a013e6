"""The speed table of a GPU in one process:  python -m benchmarks.device_table out=FOLDER limit=540

It measures the paper's three networks by the protocol of Figure 1, in float32 and bfloat16: non-private training, our
methods (also as CUDA graphs) and Opacus. The rows have the columns of `benchmarks.throughput`. Then it searches for the
largest batch of GPT-2 that fits (largest.csv). The most important cases come first. Each is written as soon as it is
measured, and is not measured again, so the command can be repeated until its exit code is 0.

Workloads: wrn16_4_ws, gpt2, roberta_base. Exit codes: 0 everything is measured; 2 a wrong option; 3 a kernel broke the
GPU for this process: repeat the command; 4 the time limit was reached: repeat the command.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.driver import Measured, progress, row_of, run
from benchmarks.job import Job
from benchmarks.options import command, device, names, option, out
from benchmarks.results import THROUGHPUT, Table, hardware, with_ratios
from benchmarks.worker import DeviceLost, Together
from groupwise.clipping.precision import full_float32
from groupwise.errors import UserError

SIZES = {"wrn16_4_ws": (512, None, None), "gpt2": (16, 12, 100), "roberta_base": (64, 12, 64)}
"""Workload -> B, layers, tokens."""
FIRST = ("none", "adaptive_layer", "flat", "ghost")
GRAPHS = ("none", "none_graph", "adaptive_layer_graph", "flat_graph")
THEN = ("none", "block", "opacus_hooks", "opacus_ghost")
DTYPES = ("float32", "bfloat16")
LARGEST = Table("largest.csv", THROUGHPUT.key, THROUGHPUT.shown)
"""The columns of throughput.csv, for the largest batch that fits; `peer` has the reason why twice its size does not."""
AGAIN, LEFT = 3, 4
"""Exit codes: a kernel broke the GPU for this process; the time limit was reached."""


@dataclass
class TableOptions:
    """The options of the command line."""

    workload: str = option("all", "all, or some of them, separated by commas")
    dtype: str = option("all", "float32, bfloat16; several separated by commas")
    device: str = device("cuda")
    limit: float = option(540.0, "seconds; repeat the command to measure the rest")
    rounds: int = option(5, "timed rounds of each method")
    steps: int = option(5, "timed steps of a round, after one warm-up step")
    out: str = out("throughput.csv and largest.csv")
    tiny: bool = option(False, "true: the smallest sizes, to test the command quickly")


def cases(options: TableOptions) -> list[tuple[Job, tuple[str, ...]]]:
    """Each workload and dtype with the methods that are compared on it, `none` first; the most important first."""
    found: list[tuple[Job, tuple[str, ...]]] = []
    workloads, dtypes = names("workload", options.workload, SIZES), names("dtype", options.dtype, DTYPES)
    several = (FIRST, GRAPHS, THEN) if options.device == "cuda" else (FIRST, THEN)
    for methods, dtype, workload in product(several, dtypes, workloads):
        job = Job(workload, "none", device=options.device, dtype=dtype, tiny=options.tiny)
        if not options.tiny:
            batch, layers, tokens = SIZES[workload]
            job = replace(job, batch=batch, layers=layers, tokens=tokens)
        found.append((job, methods))
    return found


def missing(job: Job, methods: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The methods without a row of this machine in the file, and `none`, which they are compared with."""
    rows = THROUGHPUT.rows(folder)
    same = {"workload": job.named, "dtype": job.dtype, "device": job.device, "hardware": hardware(job.device)}
    for name, value in same.items():
        rows = rows[rows[name] == value]
    left = [method for method in methods if method not in set(rows["method"])]
    return tuple(dict.fromkeys(["none", *left])) if left else ()


def measure(options: TableOptions) -> int:
    """Measure the missing cases until the time limit; returns the exit code."""
    began = time.monotonic()

    def late() -> bool:
        return time.monotonic() - began > options.limit

    with full_float32():
        for job, several in cases(options):
            methods = missing(job, several, options.out)
            if not methods:
                continue
            if late():
                print("time limit reached: repeat the command to measure the rest", file=sys.stderr)
                return LEFT
            try:
                rows = with_ratios(run(job, methods, options.rounds, options.steps, options.limit, Together, late))
            except DeviceLost as error:
                THROUGHPUT.add(options.out, [_refused(replace(job, method=error.method), error)])
                print(f"error: {error.method} broke the GPU ({error}): repeat the command", file=sys.stderr)
                return AGAIN
            except UserError as error:  # not even plain training runs: report it, and go on
                THROUGHPUT.add(options.out, [_refused(replace(job, method=name), error) for name in methods])
                print(error, file=sys.stderr)
                continue
            THROUGHPUT.add(options.out, rows)
        searches = options.device == "cuda" and options.workload == "all" and not options.tiny
        return measure_largest(options, late) if searches else 0


def measure_largest(options: TableOptions, late: Callable[[], bool]) -> int:
    """The largest batch of GPT-2 that fits, by doubling, for methods that `LARGEST` lacks; returns the exit code."""
    batch, layers, tokens = SIZES["gpt2"]
    rows = LARGEST.rows(options.out)
    there = set(rows[rows["hardware"] == hardware(options.device)]["method"])
    for method in [method for method in FIRST if method not in there]:
        job = Job("gpt2", method, batch=batch, layers=layers, tokens=tokens, device=options.device)
        row = refused = lost = None
        while refused is None:
            if late():
                return LEFT
            progress(f"gpt2: does a batch of {job.batch} fit with {method}?")
            answer: dict[str, Any] = {}
            try:
                with Together(job, options.limit) as here:
                    facts = here.ask(do="measure")
                    answer = facts if "refused" in facts else here.ask(do="round", steps=options.steps)
                refused = answer.get("refused")
            except DeviceLost as error:
                refused = lost = str(error)
            if refused is None:
                row = row_of(Measured(job, facts), 0, options.steps, answer)
                job = replace(job, batch=2 * (job.batch or 1))
        LARGEST.add(options.out, [(row or _refused(job, refused)) | {"peer": f"a batch of {job.batch}: {refused}"}])
        if lost:
            return AGAIN
    return 0


def _refused(job: Job, why: object) -> dict[str, Any]:
    return row_of(Measured(job, {"refused": why}), 0, 0, {})


main = command(TableOptions, measure)

if __name__ == "__main__":
    sys.exit(main())
