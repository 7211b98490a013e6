"""Measures the cost of the loop around the bare step:  python -m benchmarks.loop scale=mini train.batch_size=256

The loop of run.py (sampling, loading, logging, progress bar, threshold update, accounting) against the bare step
(losses, clipped backward, noise, optimiser): one process, the same examples, interleaved rounds. A run is composed,
checked and trained exactly as by `run.py`. Between rounds of its steps its clock stops, and the same model takes as
many bare steps. Any key of run.py may be given; by default task=cifar clip=adaptive_layer scale=demo.

  python -m benchmarks.loop scale=mini rounds=9
  python -m benchmarks.loop scale=paper train.batch_size=64 train.microbatch=32 train.threads=1 steps=2
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.loop_rounds import measure
from benchmarks.options import command, option, out, read
from benchmarks.results import Table, as_text
from groupwise.analysis.benchmark_rows import LOOP_CELL
from groupwise.config.compose import compose_run
from groupwise.config.keys import groups
from groupwise.config.schema import RunConfig
from groupwise.config.sentences import COMPOSITION_ERRORS, in_one_sentence
from groupwise.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
DEFAULTS = {"task": "cifar", "clip": "adaptive_layer", "scale": "demo"}
NEVER = ("eval.every", "paths.results", "tracker", "resume", "overwrite")
TABLE = Table("loop.csv", LOOP_CELL)


@dataclass
class LoopOptions:
    """What the command line may say beside the keys of `run.py`."""

    rounds: int = option(5, "of each, after one to warm up")
    steps: int = option(5, "in a round")
    out: str = out("loop.csv")


def parse(schema: type[LoopOptions], arguments: Sequence[str]) -> tuple[LoopOptions, RunConfig]:
    """Read the command line: options of the benchmark, and the run that they are about.

    Raises:
        UserError: an unknown key or value; a key that the benchmark sets itself.
    """
    own = [item for item in arguments if item.partition("=")[0] in ("rounds", "steps", "out")]
    options = read(schema, own)
    rest = [item for item in arguments if item not in own]
    given = {item.partition("=")[0].lstrip("+") for item in rest}
    if taken := sorted(given & set(NEVER)):
        raise UserError(f"{taken[0]} is not for this benchmark, which keeps nothing of the run: leave it out.")
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    try:
        return options, compose_run([*defaults, *rest], CONF)
    except COMPOSITION_ERRORS as error:
        raise UserError(in_one_sentence(error, tuple(groups(CONF)))) from None


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the command prints: milliseconds of a step, and the ratio bare / loop, medians and ranges over rounds."""
    first, frame = rows[0], pd.DataFrame(list(rows))
    title = " ".join(f"{key}={first[key]}" for key in ("task", "scale", "clip"))
    clock = "wall" if first["device"] == "cuda" else "cpu"
    for kind in ("loop", "bare"):
        frame[f"{kind} step, ms"] = 1e3 * frame[f"{kind}_{clock}_seconds"]
    shown = frame[["loop step, ms", "bare step, ms", "ratio", "wall_ratio"]].agg(["median", "min", "max"])
    return (
        f"{title}: B {first['batch']} in microbatches of {first['microbatch']}, {first['parameters']} parameters, "
        f"{first['device']}, {first['threads']} threads, {first['dtype']}\n{as_text(shown.reset_index(names=''))}"
    )


def run(given: tuple[LoopOptions, RunConfig]) -> None:
    """Measure, write the rows, print what they come to."""
    options, config = given
    rows = measure(config, options.rounds, options.steps)
    TABLE.add(options.out, rows)
    print(summary(rows))


main = command(LoopOptions, run, parse)

if __name__ == "__main__":
    sys.exit(main())
