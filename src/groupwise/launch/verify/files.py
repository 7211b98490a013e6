"""Do the files of the folder belong together, and are they what the run wrote?"""

from __future__ import annotations

import hashlib
import json
import re

from groupwise.launch.verify.check import CannotTell, Disagrees, same
from groupwise.launch.verify.record import Record
from groupwise.training.identity import flatten
from groupwise.training.leaving import row_of_data
from groupwise.training.sums import SUMS, sha256_of, summed_files

NEVER = ("checkpoint*", ".*.partial")
"""Of a finished run: what holds the key of the noise, or may."""


def sums(record: Record) -> str:
    """Every file is the one that the run wrote, none is missing, and none came later."""
    path = record.folder / SUMS
    if not path.is_file():
        raise CannotTell(f"there is no {SUMS}: the run is older than that file, or somebody removed it")
    listed = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not re.fullmatch(r"[0-9a-f]{64}  \S.*", line):
            raise Disagrees(f"{SUMS} has a line that is no sum: {line[:80]!r}")
        listed[line[66:]] = line[:64]
    there = summed_files(record.folder)
    if missing := sorted(listed.keys() - set(there)):
        raise Disagrees(f"{missing[0]} is missing")
    if more := sorted(set(there) - listed.keys()):
        raise Disagrees(f"{more[0]} is not of the run: {SUMS} does not list it")
    for name, digest in listed.items():
        if sha256_of(record.folder / name) != digest:
            raise Disagrees(f"{name} is not what the run wrote")
    return f"{len(listed)} files as the run wrote them"


def no_key(record: Record) -> str:
    """Nothing is left that holds the key of the noise."""
    for pattern in NEVER:
        for path in record.folder.glob(pattern):
            raise Disagrees(f"{path.name} is still there, and holds the key of the noise or may")
    return "no checkpoint left"


def config_hash(record: Record) -> str:
    """config.yaml has the hash that the folder, config.hash and result.json go by."""
    found = hashlib.sha256(json.dumps(record.stable, sort_keys=True).encode()).hexdigest()
    named = {"config.hash": (record.folder / "config.hash").read_text(encoding="utf-8").strip()}
    named["result.json"] = record.json("result")["hash"]
    if re.fullmatch("[0-9a-f]{12}", record.folder.resolve().name):
        named["the folder's name"] = record.folder.resolve().name
    for where, digest in named.items():
        if not found.startswith(digest) or len(digest) < 12:
            raise Disagrees(f"config.yaml has the hash {found[:12]}, and {where} says {digest[:12]}")
    return found[:12]


def row(record: Record) -> str:
    """result.json, which tables are made of, says what the other files say."""
    result = record.json("result")
    same(result, record.stable, "result.json", "config.yaml")
    git = {key: value for key, value in record.json("git").items() if key != "untracked"}
    described = row_of_data(record.json("data"))
    parts = {"git": git, "system": record.json("system"), **record.json("environment"), **described}
    count = len(record.stable)
    if not record.in_context:
        privacy = record.json("privacy")
        spent = {"spent_epsilon": privacy["spent"]["epsilon"], "replayed_steps": privacy["replayed_steps"]}
        parts["plan"] = {**privacy["plan"], **spent, "private": privacy["private"]}
        parts["seeds"] = record.json("seeds")
        final = {key: value for key, value in record.metrics[-1].items() if key not in ("step", "seconds")}
        same(result, final, "result.json", "the last line of metrics.jsonl")
        count += len(final)
    others = {key: value for key, value in flatten(parts).items() if key not in record.config}
    same(result, others, "result.json", "the file of that part")
    return f"{count + len(others)} values agree"
