"""Reads a finished run's folder, and checks that its files belong together and are what the run wrote."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.config.identity import LATER, VOLATILE, flatten
from groupwise.errors import UserError
from groupwise.rows import row_of_data
from groupwise.training.record import SUMS, sha256_of, summed_files


@dataclass(frozen=True)
class Record:
    """A finished run, as in its files; a file that cannot be read raises the exceptions of `json` and `open`."""

    folder: Path
    data: Path | None = None
    """The folder of its data now, if they were moved."""

    @classmethod
    def open(cls, folder: Path, data: Path | None = None) -> Record:
        """Raises `UserError` if that is not a finished run."""
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: name one of results/runs.")
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run, as it has no config.yaml: name one of results/runs.")
        if not (folder / "DONE").is_file():
            raise UserError(f"{folder} is not a finished run, as it has no DONE: repeat its command to the end first.")
        return cls(folder, data)

    def json(self, name: str) -> dict[str, Any]:
        """The content of ``<name>.json``."""
        content = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{name}.json holds no table")
        return content

    @cached_property
    def config(self) -> dict[str, Any]:
        """Dotted key -> value of config.yaml, as it is written: also keys that this version does not know."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        try:
            return flatten(OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml")))  # type: ignore[arg-type]
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"config.yaml cannot be read: {str(error).splitlines()[0]}") from error

    @property
    def stable(self) -> dict[str, Any]:
        """The keys and values that are hashed."""
        kept = {key: value for key, value in self.config.items() if not key.startswith(VOLATILE)}
        return {key: value for key, value in kept.items() if key not in LATER or value != LATER[key]}

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan; an infinite ε is a number here."""
        plan = self.json("privacy")["plan"]
        return {**plan, "epsilon": float(plan["epsilon"])}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def in_context(self) -> bool:
        """Whether nothing was trained (`eval.shots`); then there is no plan and no metrics.jsonl."""
        return self.config.get("eval.shots") is not None


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
    """result.json, from which tables are made, agrees with the other files."""
    result = record.json("result")
    same(result, record.stable, "result.json", "config.yaml")
    git = {key: value for key, value in record.json("git").items() if key != "untracked"}
    described = row_of_data(record.json("data"))
    parts = {"git": git, "system": record.json("system"), **record.json("environment"), **described}
    count = len(record.stable)
    if not record.in_context:
        privacy = record.json("privacy")
        spent = {"spent_epsilon": privacy["spent"]["epsilon"], "replayed_steps": privacy["replayed_steps"]}
        sums = {f"total_{name}": value for name, value in privacy.get("total", {}).items()}
        parts["plan"] = {**privacy["plan"], **spent, **sums, "private": privacy["private"]}
        parts["seeds"] = record.json("seeds")
        final = {key: value for key, value in record.metrics[-1].items() if key not in ("step", "seconds")}
        same(result, final, "result.json", "the last line of metrics.jsonl")
        count += len(final)
    others = {key: value for key, value in flatten(parts).items() if key not in record.config}
    same(result, others, "result.json", "the file of that part")
    return f"{count + len(others)} values agree"


OK, FAILED, SKIPPED = "ok", "FAILED", "not checked"


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    result: str
    """`OK`, `FAILED` or `SKIPPED`."""
    detail: str


class Disagrees(Exception):
    """Two things that must agree do not; the text says which."""


class CannotTell(Exception):
    """There is nothing to compare with; the text says why."""


def perform(name: str, check: Callable[..., str], *arguments: Any) -> Check:
    """Run a check, which returns what it found, or raises `Disagrees` or `CannotTell`.

    A record that lacks what the check reads, or holds something else there, fails it.
    """
    try:
        return Check(name, OK, check(*arguments))
    except Disagrees as found:
        return Check(name, FAILED, str(found))
    except CannotTell as reason:
        return Check(name, SKIPPED, str(reason))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        first = (str(error).splitlines() or [""])[0]
        return Check(name, FAILED, f"the record cannot be read there ({type(error).__name__}: {first})")


def same(found: Mapping[str, Any], expected: Mapping[str, Any], where: str, against: str) -> None:
    """Raise `Disagrees` for the first key of `expected` whose value in `found` differs (numbers: by more than 1e-9)."""
    for key, value in expected.items():
        if key not in found:
            raise Disagrees(f"{where} has no {key}")
        if not equal(found[key], value):
            raise Disagrees(f"{where} has {key} = {found[key]}, and {against} has {value}")


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; infinity may be written as "inf", and floats may differ by 1e-9."""
    numbers = [_number(value) for value in (one, other)]
    if None in numbers:
        return bool(one == other)
    a, b = numbers
    return bool(a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b)))  # type: ignore[operator, arg-type]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("inf", "Infinity") else None
