"""The speed table of a GPU in one process:  python -m benchmarks.device_table out=FOLDER limit=540

The paper's three networks at Figure 1's protocol, non-private, ours (as CUDA graphs too) and Opacus's, in float32 and
bfloat16: rows of `benchmarks.throughput`; then the largest batch of GPT-2 that fits (largest.csv). What matters most
comes first, a case is written as soon as it is done, and what is written is not measured again, so the command can be
given until it says that nothing is left.

Workloads: wrn16_4_ws, gpt2, roberta_base. Exit codes: 0 all is done; 2 a mistake; 3 the GPU is lost to this process,
give the command again; 4 some is left.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from benchmarks.driver import Measured, progress, row_of, run
from benchmarks.job import Job
from benchmarks.options import command, device, names, option, out
from benchmarks.results import THROUGHPUT, Table, hardware, with_ratios
from benchmarks.worker import DeviceLost, Together
from groupwise.errors import UserError
from groupwise.training.arithmetic import arithmetic

SIZES = {"wrn16_4_ws": (512, None, None), "gpt2": (16, 12, 100), "roberta_base": (64, 12, 64)}
"""Workload -> B, layers, tokens."""
FIRST = ("none", "adaptive_layer", "flat", "ghost")
GRAPHS = ("none", "none_graph", "adaptive_layer_graph", "flat_graph")
THEN = ("none", "block", "opacus_hooks", "opacus_ghost")
DTYPES = ("float32", "bfloat16")
LARGEST = Table("largest.csv", THROUGHPUT.key, THROUGHPUT.shown)
"""With the columns of throughput.csv: the largest batch that fits; `peer` says what became of the next."""
AGAIN, LEFT = 3, 4
"""Exit codes: a kernel broke the GPU for this process, and the same command goes on; time was up."""


@dataclass
class TableOptions:
    """What the command line may say."""

    workload: str = option("all", "several by commas")
    dtype: str = option("all", "float32, bfloat16; several by commas")
    device: str = device("cuda")
    limit: float = option(540.0, "seconds for all; what is not done by then is left for the next call")
    rounds: int = option(5, "how often each method has its turn")
    steps: int = option(5, "steps on the clock in a turn, after one to warm up")
    out: str = out("throughput.csv and largest.csv")
    tiny: bool = option(False, "true: the smallest sizes, to see that everything runs")


def cases(options: TableOptions) -> list[tuple[Job, tuple[str, ...]]]:
    """A workload in a dtype, and the methods that are compared on it, `none` first; what matters most comes first."""
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
    """The methods that the file has no row of, on this machine; `none` goes with them."""
    rows = THROUGHPUT.rows(folder)
    same = {"workload": job.named, "dtype": job.dtype, "device": job.device, "hardware": hardware(job.device)}
    for name, value in same.items():
        rows = rows[rows[name] == value]
    left = [method for method in methods if method not in set(rows["method"])]
    return tuple(dict.fromkeys(["none", *left])) if left else ()


def measure(options: TableOptions) -> int:
    """Measure what is missing, as far as the time goes; returns the exit code."""
    began = time.monotonic()

    def late() -> bool:
        return time.monotonic() - began > options.limit

    with arithmetic(torch.device(options.device)):
        for job, several in cases(options):
            methods = missing(job, several, options.out)
            if not methods:
                continue
            if late():
                print("time is up: the same command goes on where this one stopped", file=sys.stderr)
                return LEFT
            asked: list[str] = []

            def start(job: Job, limit: float, asked: list[str] = asked) -> Together:
                asked.append(job.method)
                return Together(job, limit)

            try:
                rows = with_ratios(run(job, methods, options.rounds, options.steps, options.limit, start, late))
            except DeviceLost as error:
                THROUGHPUT.add(options.out, [_refused(replace(job, method=asked[-1]), error)])
                print(f"error: {asked[-1]} broke the GPU ({error}): give the command again", file=sys.stderr)
                return AGAIN
            except UserError as error:  # plain training itself does not run: the case is reported, and the others go on
                THROUGHPUT.add(options.out, [_refused(replace(job, method=name), error) for name in methods])
                print(error, file=sys.stderr)
                continue
            THROUGHPUT.add(options.out, rows)
        return measure_largest(options, late) if options.device == "cuda" and options.workload == "all" else 0


def measure_largest(options: TableOptions, late: Callable[[], bool]) -> int:
    """The largest batch of GPT-2 that fits, by doubling, for methods that `LARGEST` lacks; returns the exit code."""
    batch, layers, tokens = SIZES["gpt2"]
    there = set(LARGEST.rows(options.out)["method"])
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
