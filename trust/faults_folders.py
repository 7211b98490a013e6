"""Many thousand results folders: what looks at them answers in seconds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from groupwise.atomic import write_json
from groupwise.cells import read_sweep
from groupwise.launch.collect import CONF
from groupwise.launch.compose import register
from groupwise.launch.sweep import table_cells
from groupwise.training.identity import stable_config
from trust.faults_process import Outcome

MOST = 10.0
"""Seconds of one core, so that what else runs on the machine does not count."""
SWEEP = "cifar"


def many(folders: int, work: Path, seed: int = 13) -> list[Outcome]:
    """Make that many finished runs, one sweep of all of them, and time the commands that read them."""
    runs, sweep, measured = work / "runs", work / "sweeps" / "all", work / "measured"
    make(folders, runs, sweep, random.Random(seed))
    rows = []
    for name, command in {
        "status": ("groupwise.launch.status", str(sweep)),
        "collect": ("groupwise.launch.collect", SWEEP, "scale=mini", "--runs", str(runs), "--out", str(measured)),
        "tables": ("groupwise.analysis.tables", "all", "--out", str(work / "tables")),
    }.items():
        began = _processor()
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        seconds = _processor() - began
        if done.returncode:
            print(done.stderr, file=sys.stderr)
        lost = done.returncode != 0 or seconds > MOST
        rows.append(
            Outcome(f"{folders} results folders: {name}", 1, int(lost), f"answers in under {MOST:.0f} s of one core")
        )
        print(f"{name}: {seconds:.1f} s", file=sys.stderr)
    return rows


def _processor() -> float:
    """Seconds that finished children have computed for."""
    times = os.times()
    return times.children_user + times.children_system


def make(folders: int, runs: Path, sweep: Path, chance: random.Random) -> None:
    """The cells of `SWEEP` at scale=mini as finished runs, and others up to that many; a sweep that lists all."""
    register()
    planned = [cell for _, cell in table_cells(read_sweep(CONF / "sweep" / f"{SWEEP}.yaml"), "mini", CONF)]
    known = {cell.hash: {"hash": cell.hash, **stable_config(cell.config)} for cell in planned}
    row = next(iter(known.values()))
    while len(known) < folders:
        digest = f"{chance.getrandbits(256):064x}"
        known[digest] = {**row, "hash": digest, "seed": len(known)}
    cells = []
    sweep.mkdir(parents=True)
    for digest, content in known.items():
        folder = runs / digest[:12]
        folder.mkdir(parents=True)
        result = {**content, "valid/accuracy": chance.uniform(10, 90), "system.wall_seconds": 30.0, "git.sha": "0" * 40}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "config.hash").write_text(f"{digest}\n")
        (folder / "DONE").write_text("2024-01-01T00:00:00+00:00\n")
        os.utime(folder / "DONE", (2e9, 2e9))
        cells.append(
            {"name": digest[:12], "seed": 0, "overrides": [], "hash": digest, "run": str(folder), "done_before": True}
        )
    write_json(sweep / "cells.json", {"sweep": SWEEP, "scale": "mini", "cells": cells})
