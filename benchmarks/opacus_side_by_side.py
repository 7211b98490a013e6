"""Compares the same training by Opacus and by `make_private`:  python -m benchmarks.opacus_side_by_side

Two scripts train the same CNN on the same digits, at the same B, epsilon, delta, epochs, momentum, threshold and
physical batch: examples/own_model.py and benchmarks/opacus_own_model.py. Only the learning rate, the seed of the
weights and, for flat clipping, one argument are changed. The best learning rate of each method is chosen on a
separate seed, and the method is then trained with it on `seeds` other seeds. Rows hold accuracy, epsilon and lines of
code; `benchmarks.small_models` measures time.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import command, option, out
from benchmarks.results import MACHINE, Table
from groupwise.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
OURS, THEIRS = ROOT / "examples" / "own_model.py", ROOT / "benchmarks" / "opacus_own_model.py"
END, PARTS = ", batch_size=256)", ", batch_size=256, microbatch=128"
"""The end of the call of make_private, and what replaces it, with microbatches as large as Opacus's."""
METHODS: dict[str, tuple[Path, tuple[tuple[str, str], ...]]] = {
    "opacus_hooks": (THEIRS, ()),
    "flat": (OURS, ((END, f'{PARTS}, clip="flat")'),)),
    "adaptive_layer": (OURS, ((END, f"{PARTS})"),)),
}
"""Method -> its script, and pairs of a text and its replacement."""
RATES = (0.1, 0.2, 0.4, 0.8)
"""The learning rates that are tried for each method."""
TUNED_ON = 100
"""The seed of the learning-rate search; the results use other seeds."""
SHOWN = ("method", "role", "learning_rate", "accuracy", "epsilon", "script_lines")
TABLE = Table("opacus_side_by_side.csv", ("method", *MACHINE), SHOWN)


@dataclass
class SideBySideOptions:
    """The options of the command line."""

    seeds: int = option(3, "trainings of each method at its best learning rate")
    limit: float = option(900.0, "seconds that one training may take")
    out: str = out("opacus_side_by_side.csv")


Measure = Callable[[str, float], dict[str, Any]]


def script_lines(script: Path) -> int:
    """The number of lines of code in a script, without its docstring, comments and blank lines."""
    _, _, code = script.read_text(encoding="utf-8").split('"""', 2)
    lines = (line.strip() for line in code.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def variant(method: str, rate: float, seed: int) -> str:
    """The script of a method with that learning rate and seed.

    Raises:
        UserError: a text to be replaced does not occur exactly once.
    """
    script, replaced = METHODS[method]
    source = script.read_text(encoding="utf-8")
    for old, new in (*replaced, ("lr=0.4", f"lr={rate}"), ("manual_seed(0)", f"manual_seed({seed})")):
        if source.count(old) != 1:
            raise UserError(
                f"{script.name} contains {old!r} {source.count(old)} times instead of once: correct METHODS."
            )
        source = source.replace(old, new)
    return source


def trained(source: str, limit: float) -> dict[str, Any]:
    """Run a script in a separate process, on one thread; returns the epsilon and accuracy that it prints.

    Raises:
        UserError: it failed, took longer than `limit` seconds, or printed no result.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, "-c", source]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"A training took more than {limit:g} s: give a larger limit.") from error
    found = re.search(r"epsilon ([\d.]+), accuracy ([\d.]+)\n$", done.stdout)
    if done.returncode or found is None:
        raise UserError(f"A training failed: {(done.stderr.strip().splitlines() or ['it printed no result'])[-1]}.")
    return {"epsilon": float(found[1]), "accuracy": 100 * float(found[2])}


def measure(options: SideBySideOptions, train: Measure = trained) -> list[dict[str, Any]]:
    """The rows of all methods: the search on `TUNED_ON`, then each seed at the best learning rate (the
    smallest of several equally good ones)."""
    rows: list[dict[str, Any]] = []

    def take(method: str, role: str, rate: float, seed: int) -> None:
        trained = train(variant(method, rate, seed), options.limit)
        row = {"method": method, "role": role, "seed": seed, "learning_rate": rate, **trained}
        row |= {"script_lines": script_lines(METHODS[method][0])}
        rows.append(row | {"device": "cpu", "threads": 1, "dtype": "float32"})
        print(f"{method:15} {role:7} seed {seed:3} rate {rate:g}: {trained['accuracy']:.1f} %", flush=True)

    for rate in RATES:
        for method in METHODS:
            take(method, "search", rate, TUNED_ON)
    best = {
        method: max((row["accuracy"], -row["learning_rate"]) for row in rows if row["method"] == method)
        for method in METHODS
    }
    for seed in range(options.seeds):
        for method, (_, rate) in best.items():
            take(method, "result", -rate, seed)
    return rows


def run(options: SideBySideOptions) -> None:
    """Measure and write the rows."""
    TABLE.add(options.out, measure(options))


main = command(SideBySideOptions, run)

if __name__ == "__main__":
    sys.exit(main())
