"""The speed table of a GPU in one process:  python -m benchmarks.device_table out=FOLDER limit=540

The paper's three networks at Figure 1's protocol, non-private, ours (as CUDA graphs too) and Opacus's, in float32 and
bfloat16: rows of `benchmarks.throughput`. What matters most comes first, a case is written as soon as it is done, and
what is written is not measured again, so the command can be given until it says that nothing is left. `--help` lists
the options.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.options import check_above_zero, check_device, command, names, read
from groupwise.errors import UserError

SIZES = {"wrn16_4_ws": (512, None, None), "gpt2": (16, 12, 100), "roberta_base": (64, 12, 64)}
"""Workload -> B, layers, tokens."""
FIRST = ("none", "adaptive_layer", "flat", "ghost")
GRAPHS = ("none", "none_graph", "adaptive_layer_graph", "flat_graph")
THEN = ("none", "block", "opacus_hooks", "opacus_ghost")
DTYPES = ("float32", "bfloat16")
LARGEST = "largest.csv"
"""Beside the table, with its columns: the largest batch that fits; `peer` says what became of the next."""
AGAIN = 3
"""Exit code: a kernel broke the GPU for this process; the same command goes on with the next method."""
HELP = """python -m benchmarks.device_table [key=value ...]

  out=results/measured/benchmarks   the folder of throughput.csv, and of largest.csv: batches of GPT-2 that fit
  workload=all     wrn16_4_ws, gpt2, roberta_base; several by commas
  dtype=all        float32, bfloat16; several by commas
  device=cuda      or cpu
  limit=540        seconds for all; what is not done by then is left for the next call
  rounds=5         how often each method has its turn
  steps=5          steps on the clock in a turn, after one to warm up
  tiny=false       true: the smallest sizes, to see that everything runs

Exit codes: 0 all is done; 2 a mistake; 3 the GPU is lost to this process, give the command again; 4 some is left."""
LEFT = 4


@dataclass
class TableOptions:
    """What the command line may say; see `HELP`."""

    out: str = "results/measured/benchmarks"
    workload: str = "all"
    dtype: str = "all"
    device: str = "cuda"
    limit: float = 540.0
    rounds: int = 5
    steps: int = 5
    tiny: bool = False


@dataclass(frozen=True)
class Case:
    """A workload in a dtype, and the methods that are compared on it, `none` first."""

    job: Job
    methods: tuple[str, ...]


def cases(options: TableOptions) -> list[Case]:
    """All of them, what matters most first."""
    found = []
    workloads, dtypes = names("workload", options.workload, SIZES), names("dtype", options.dtype, DTYPES)
    several = (FIRST, GRAPHS, THEN) if options.device == "cuda" else (FIRST, THEN)
    for methods, dtype, workload in product(several, dtypes, workloads):
        batch, layers, tokens = SIZES[workload]
        job = Job(workload, "none", device=options.device, dtype=dtype, tiny=options.tiny)
        if not options.tiny:
            job = replace(job, batch=batch, layers=layers, tokens=tokens)
        found.append(Case(job, methods))
    return found


def missing(case: Case, path: Path, hardware: str) -> tuple[str, ...]:
    """Methods of a case that the file has no row of, on this hardware; `none` goes with them."""
    import pandas as pd

    there: set[str] = set()
    if path.exists():
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        mine = (rows["workload"] == case.job.named) & (rows["dtype"] == case.job.dtype) & (rows["hardware"] == hardware)
        there = set(rows[mine & (rows["device"] == case.job.device)]["method"])
    left = [method for method in case.methods if method not in there]
    return ("none", *(method for method in left if method != "none")) if left else ()


def measure(options: TableOptions) -> int:
    """Measure what is missing, as far as the time goes; returns the exit code."""
    import torch

    from benchmarks.driver import progress, run
    from benchmarks.results import FILE, merge, provenance, table, with_ratios
    from benchmarks.worker import DeviceLost, Together
    from groupwise.training.arithmetic import arithmetic

    began = time.monotonic()
    path, source, longest = Path(options.out) / FILE, provenance(options.device), 0.0

    def late() -> bool:
        return time.monotonic() - began > options.limit

    for case in cases(options):
        methods = missing(case, path, source["hardware"])
        if not methods:
            continue
        if time.monotonic() - began + longest > options.limit:
            print("time is up: the same command goes on where this one stopped", file=sys.stderr)
            return LEFT
        started = time.monotonic()
        asked: list[str] = []

        def start(job: Job, limit: float, asked: list[str] = asked) -> Together:
            asked.append(job.method)
            return Together(job, limit)

        try:
            with arithmetic(torch.device(options.device)):
                found = run(case.job, methods, options.rounds, options.steps, options.limit, progress, start, late)
        except DeviceLost as error:
            broken = {**_key(case.job), "method": asked[-1], "status": f"refused: {error}", "round": 0, "steps": 0}
            merge(path, [broken | source])
            print(
                f"error: {asked[-1]} broke the GPU for this process ({error}): give the command again", file=sys.stderr
            )
            return AGAIN
        except UserError as error:  # plain training itself does not run: the case is told, and the others go on
            merge(
                path, [{**_key(case.job), "method": name, "status": f"refused: {error}"} | source for name in methods]
            )
            print(error, file=sys.stderr)
            continue
        rows = [row | source for row in with_ratios(found)]
        merge(path, rows)
        print(table(rows), flush=True)
        longest = max(longest, time.monotonic() - started)
    return measure_largest(options, late) if options.device == "cuda" and options.workload == "all" else 0


def measure_largest(options: TableOptions, late: Callable[[], bool]) -> int:
    """The largest batch of GPT-2 that fits, by doubling, for methods that `LARGEST` lacks; returns the exit code."""
    import pandas as pd

    from benchmarks.driver import Measured, progress, row_of
    from benchmarks.results import merge, provenance
    from benchmarks.worker import DeviceLost, Together

    path, source = Path(options.out) / LARGEST, provenance(options.device)
    there = set(pd.read_csv(path)["method"]) if path.exists() else set()
    batch, layers, tokens = SIZES["gpt2"]
    for method in FIRST:
        found: dict[str, Any] | None = None
        job = Job("gpt2", method, batch=batch, layers=layers, tokens=tokens, device=options.device)
        while method not in there:
            if late():
                return LEFT
            progress(f"gpt2: does a batch of {job.batch} fit with {method}?")
            facts: dict[str, Any] = {}
            answer: dict[str, Any] = {}
            lost = ""
            try:
                with Together(job, options.limit) as here:
                    facts = here.ask(do="measure")
                    answer = {} if "refused" in facts else here.ask(do="round", steps=options.steps)
            except DeviceLost as error:
                lost = str(error)
            refused = lost or facts.get("refused") or answer.get("refused")
            if refused is None:
                found = row_of(Measured(job, facts), 0, options.steps, answer)
                job = replace(job, batch=2 * (job.batch or 1))
                continue
            row = found or row_of(Measured(job, {"refused": refused, **facts}), 0, 0, answer)
            merge(path, [row | source | {"peer": f"a batch of {job.batch}: {refused}"}])
            if lost:
                return AGAIN
            break
    return 0


def _key(job: Job) -> dict[str, Any]:
    return {
        "workload": job.named,
        **{key: getattr(job, key) for key in ("batch", "layers", "threads", "device", "dtype")},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""

    def work(given: list[str]) -> int:
        options = read(TableOptions, given)
        check_above_zero(options, "limit", "rounds", "steps")
        check_device(options.device)
        return measure(options)

    return command(work, HELP, "the cases that were done are written", arguments)


if __name__ == "__main__":
    sys.exit(main())
