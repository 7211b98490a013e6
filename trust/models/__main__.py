"""Clip every architecture in every mode and compare with the reference: `python -m trust.models`.

The status of a row is exact (equal to a float64 loop over single examples), refused (with the error message), false
alarm (`verify` refuses a model that is clipped exactly), wrong or traceback; the last three give exit code 1.
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
from trust.models.check import attempt, check, compute_known
from trust.models.hugging_face import ADAPTERS, TEXT
from trust.models.hugging_face_media import IMAGES_AND_SOUND, VIDEO_MODELS
from trust.models.libraries import DIFFUSERS, NETWORKS, TIMM, VIDEO
from trust.models.plain_attention import ATTENTION
from trust.models.plain_layers import LAYERS
from trust.models.plain_networks import CUSTOM_NETWORKS
from trust.models.plain_recurrent import RECURRENT
from trust.models.rows import HEAD, MODES, TRACEBACK, Row

ARCHITECTURES: tuple[Architecture, ...] = (
    *TEXT,
    *IMAGES_AND_SOUND,
    *NETWORKS,
    *ADAPTERS,
    *LAYERS,
    *RECURRENT,
    *ATTENTION,
    *CUSTOM_NETWORKS,
    *VIDEO,
    *VIDEO_MODELS,
    *TIMM,
    *DIFFUSERS,
)
RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "models.csv"


def measure(architecture: Architecture, modes: Sequence[str]) -> list[Row]:
    """The rows of one architecture; if it cannot be built, each row has the traceback."""
    _, note, known = attempt(lambda: compute_known(architecture))
    if known is None:
        return [Row(architecture.family, architecture.name, mode, TRACEBACK, note=note) for mode in modes]
    return [check(architecture, mode, known) for mode in modes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print each architecture; write the table if all were measured; returns 1 if a row is faulty."""
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
        if architecture.name in (options.only or names) and not _is_installed(architecture.needs):
            print(f"{architecture.name}: skipped, {architecture.needs} is not installed; its committed rows stay")
            lines += [line for line in committed if line[HEAD.index("architecture")] == architecture.name]
        elif architecture.name in (options.only or names):
            start = time.monotonic()
            found = measure(architecture, options.modes)
            rows += found
            lines += [row.line for row in found]
            words = ", ".join(map(_words, found))
            print(f"{architecture.name} ({time.monotonic() - start:.1f} s): {words}", flush=True)
    faulty = [row for row in rows if row.faulty]
    for note, of in _by_note(faulty).items():
        print(f"{'; '.join(of)}\n    {note}", file=sys.stderr)
    print(f"{len(rows)} rows, {len(faulty)} of them false alarms, wrong or a traceback")
    if not options.only and tuple(options.modes) == MODES:
        write_text(RESULT, csv_text(HEAD, lines))
    return 1 if faulty else 0


def _is_installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def _by_note(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Note -> the architectures and modes that have it."""
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
