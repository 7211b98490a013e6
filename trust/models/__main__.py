"""Clip every architecture in every mode and compare with the truth: `python -m trust.models`.

Each row says exact (equal to a float64 loop over single examples), refused (and the sentence), false alarm (`verify`
refuses what is exact), wrong or traceback; exit code 1 if there is any of the last three.
"""

import argparse
import csv
import importlib.util
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from groupwise.atomic import write_text
from groupwise.rows import csv_text
from trust.models.architecture import Architecture
from trust.models.check import attempt, check, know
from trust.models.hugging_face import ADAPTERS, TEXT
from trust.models.hugging_face_senses import SENSES, WATCHING
from trust.models.libraries import DIFFUSERS, NETWORKS, TIMM, VIDEO
from trust.models.plain_attention import ATTENTION
from trust.models.plain_layers import LAYERS
from trust.models.plain_networks import NETWORKS_OF_ONES_OWN
from trust.models.plain_recurrent import RECURRENT
from trust.models.rows import HEAD, MODES, TRACEBACK, Row

ARCHITECTURES: tuple[Architecture, ...] = (
    *TEXT,
    *SENSES,
    *NETWORKS,
    *ADAPTERS,
    *LAYERS,
    *RECURRENT,
    *ATTENTION,
    *NETWORKS_OF_ONES_OWN,
    *VIDEO,
    *WATCHING,
    *TIMM,
    *DIFFUSERS,
)


RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "models.csv"


def measure(architecture: Architecture, modes: Sequence[str]) -> list[Row]:
    """The rows of one architecture; if it cannot be built, each has the traceback."""
    _, note, known = attempt(lambda: know(architecture))
    if known is None:
        return [Row(architecture.family, architecture.name, mode, TRACEBACK, note=note) for mode in modes]
    return [check(architecture, mode, known) for mode in modes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line each, and write the table if all were measured; returns 1 if a row has a fault."""
    names = [architecture.name for architecture in ARCHITECTURES]
    parser = argparse.ArgumentParser(prog="python -m trust.models", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of other libraries; those of groupwise are counted
    rows: list[Row] = []
    lines: list[list[str]] = []
    committed = list(csv.reader(RESULT.read_text(encoding="utf-8").splitlines())) if RESULT.is_file() else []
    for architecture in ARCHITECTURES:
        if architecture.name in (options.only or names) and not _is_there(architecture.needs):
            print(f"{architecture.name}: skipped, {architecture.needs} is not installed; its committed rows stay")
            lines += [line for line in committed if line[HEAD.index("architecture")] == architecture.name]
        elif architecture.name in (options.only or names):
            start = time.monotonic()
            found = measure(architecture, options.modes)
            rows += found
            lines += [row.line for row in found]
            print(
                f"{architecture.name} ({time.monotonic() - start:.1f} s): {', '.join(map(_words, found))}", flush=True
            )
    faulty = [row for row in rows if row.faulty]
    for note, of in _by_note(faulty).items():
        print(f"{'; '.join(of)}\n    {note}", file=sys.stderr)
    print(f"{len(rows)} rows, {len(faulty)} of them false alarms, wrong or a traceback")
    if not options.only and tuple(options.modes) == MODES:
        write_text(RESULT, csv_text(HEAD, lines))
    return 1 if faulty else 0


def _is_there(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def _by_note(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Note -> the architectures and modes with it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.note, []).append(f"{row.architecture}, {row.mode}")
    return found


def _words(row: Row) -> str:
    words = f"{row.mode} {row.status}"
    if row.error is not None:
        words += f" {row.error:.0e}"
    if row.dropout not in ("", "taken"):
        words += f", dropout {row.dropout}"
    return words


if __name__ == "__main__":
    sys.exit(main())
