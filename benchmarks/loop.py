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

from benchmarks.loop_rounds import measure
from benchmarks.options import command, option, out, read
from benchmarks.results import Table
from groupwise.analysis.benchmark_rows import LOOP_CELL
from groupwise.config.compose import compose_run
from groupwise.config.keys import groups
from groupwise.config.schema import RunConfig
from groupwise.config.sentences import COMPOSITION_ERRORS, in_one_sentence
from groupwise.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
DEFAULTS = {"task": "cifar", "clip": "adaptive_layer", "scale": "demo"}
SHOWN = ("task", "scale", "clip", "batch", "loop_cpu_seconds", "bare_cpu_seconds", "ratio", "wall_ratio")
TABLE = Table("loop.csv", LOOP_CELL, SHOWN)


@dataclass
class LoopOptions:
    """What the command line may say beside the keys of `run.py`."""

    rounds: int = option(5, "of each, after one to warm up")
    steps: int = option(5, "in a round")
    out: str = out("loop.csv")


def parse(schema: type[LoopOptions], arguments: Sequence[str]) -> tuple[LoopOptions, RunConfig]:
    """Read the command line: options of the benchmark, and the run that they are about.

    Raises:
        UserError: an unknown key or value.
    """
    own = [item for item in arguments if item.partition("=")[0] in ("rounds", "steps", "out")]
    options = read(schema, own)
    rest = [item for item in arguments if item not in own]
    given = {item.partition("=")[0].lstrip("+") for item in rest}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    try:
        return options, compose_run([*defaults, *rest], CONF)
    except COMPOSITION_ERRORS as error:
        raise UserError(in_one_sentence(error, tuple(groups(CONF)))) from None


def run(given: tuple[LoopOptions, RunConfig]) -> None:
    """Measure, write and print the rows."""
    options, config = given
    TABLE.add(options.out, measure(config, options.rounds, options.steps))


main = command(LoopOptions, run, parse)

if __name__ == "__main__":
    sys.exit(main())
