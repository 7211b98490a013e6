"""Manages the folder of a run, `results/runs/<hash>`: its files, its state, and the provenance of an exported model."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from groupwise.atomic import lock, remove, write_json, write_text
from groupwise.config.identity import (
    config_hash,
    differences,
    flat_config,
    flatten,
    load_config,
    save_config,
    stable_config,
)
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.rows import HELD_OUT, row_of_data
from groupwise.training.checkpoint import forget_checkpoints, previous
from groupwise.training.provenance import environment, git_state


class RunRecord:
    """The record of one run. `open` writes nothing, `begin` starts writing, and `finish` closes the record."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        self.hash = config_hash(config)
        self._lock: IO[bytes] | None = None
        self._found = self._state()

    @classmethod
    def open(cls, config: RunConfig) -> "RunRecord":
        """The record of ``config``; raises `UserError` if ``config.resume`` has no run of the same configuration."""
        if config.resume is None:
            folder = Path(config.paths.results).expanduser() / "runs" / config_hash(config)[:12]
        else:
            folder = Path(config.resume).expanduser()
            if not folder.is_dir():
                raise UserError(f"resume={config.resume} is not a folder: give one in {config.paths.results}/runs.")
            if differing := differences(load_config(folder / "config.yaml"), config):
                raise UserError(
                    f"resume={config.resume} was made with another configuration: {'; '.join(differing)}. "
                    "Give the same values, or leave resume out."
                )
        return cls(folder, config)

    @property
    def finished(self) -> bool:
        """Whether the run is complete, and overwrite=true was not given."""
        written = (self.folder / "result.json").is_file() and not self._checkpoints()
        return (written or (self.folder / "DONE").is_file()) and not self.config.overwrite

    @property
    def checkpoint(self) -> Path:
        """The path of the last checkpoint; `previous` returns the path of the one before it."""
        return self.folder / "checkpoint.pt"

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from, which overwrite=true will not remove."""
        return bool(self._checkpoints()) and not (self.config.overwrite and self._lock is None)

    def read(self, name: str) -> dict[str, Any]:
        """Read ``<name>.json`` (privacy, data, result, ...); raises `UserError` if it is missing or was altered."""
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(_altered(path)) from error
        if not isinstance(content, dict):
            raise UserError(_altered(path))
        return content

    def begin(self, resumed_from: Path | None = None) -> None:
        """Make and lock the folder, and write the configuration, the state of git and the environment.

        If there is no checkpoint, the files of an interrupted run are removed. `resumed_from` is the checkpoint that
        was loaded. If it is the one before the last, it replaces the last, which is damaged. Raises `UserError` if
        another process is running the same configuration, or has run it since `open`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or lock(self.folder / ".lock")
        if self._lock is None:
            raise UserError(
                f"Another process is running this configuration in {self.folder}: wait until it ends, or change a "
                "setting, such as the seed."
            )
        if self._state() != self._found:
            self.close()
            raise UserError(f"Another process was writing to {self.folder} just now: run the same command again.")
        if self.config.overwrite or not self.resumable:
            self._clear()
        if resumed_from == previous(self.checkpoint):
            os.replace(resumed_from, self.checkpoint)
        (self.folder / "result.json").unlink(missing_ok=True)
        for left in self.folder.glob(".*.partial"):  # from a process that was killed while it was writing
            left.unlink()
        write_text(self.folder / "config.yaml", save_config(self.config))
        write_text(self.folder / "config.hash", self.hash + "\n")
        with open(self.folder / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) + "\n")
        git = git_state()
        if diff := git.pop("diff"):
            write_text(self.folder / "diff.patch", diff)
        write_json(self.folder / "git.json", git)
        write_json(self.folder / "environment.json", environment())

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``<name>.json`` atomically (privacy, seeds, system, ...)."""
        write_json(self.folder / f"{name}.json", content)

    def write_outputs(self, outputs: Mapping[str, list[dict[str, Any]]]) -> None:
        """Write outputs-<split>.jsonl, with one line for each text that the model generated."""
        for split, rows in outputs.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text(self.folder / f"outputs-{split}.jsonl", lines)

    def write_data(self, description: Mapping[str, Any]) -> None:
        """Write data.json; raises `UserError` if a resumed run began with other data."""
        written = json.loads(json.dumps(description))
        if self.resumable and self._read_if_there("data") not in ({}, written):
            raise UserError(
                f"The data are not those that the run in {self.folder} began with: restore them, or start afresh with "
                "overwrite=true."
            )
        self.write("data", written)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. The line stays if the process is killed later."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, without an incomplete last line; raises `UserError` if the file was altered."""
        path = self.folder / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
            return [{"step": int(row["step"]), **row} for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(_altered(path)) from error

    def cut_metrics(self, step: int) -> None:
        """Remove rows from metrics.jsonl on resume: those after the checkpoint's ``step``, as these steps run again,
        and the row of the final evaluation, a second one of the last step."""
        kept: dict[int, dict[str, Any]] = {}
        for row in self.metrics():
            if row["step"] <= step:
                kept.setdefault(row["step"], row)
        write_text(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept.values()))

    def replayed(self, start: int) -> int:
        """The number of steps that ran again so far, including those after ``start``, where the run resumes now."""
        if start and not (self.folder / "metrics.jsonl").is_file():
            raise UserError(_altered(self.folder / "metrics.jsonl"))
        before = self._read_if_there("privacy").get("replayed_steps", 0)
        if not isinstance(before, int):
            raise UserError(_altered(self.folder / "privacy.json"))
        return before + max([row["step"] - start for row in self.metrics()] + [0])

    def finish(
        self, metrics: Mapping[str, Any], *, plan: Mapping[str, Any], system: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write system.json and result.json, remove the checkpoints, and write DONE; returns the flat row.

        It has the final metrics, the plan with other entries on privacy, and facts about the machine (`resources`).
        """
        self.write("system", system)
        row: dict[str, Any] = {"hash": self.hash, "finished_at": datetime.now(UTC).isoformat(timespec="seconds")}
        asked = ("resume", "overwrite", "explain", "export")
        git = {key: value for key, value in self.read("git").items() if key != "untracked"}
        parts = {"git": git, "plan": plan, "system": system, **self.read("environment")}
        parts |= {"seeds": self._read_if_there("seeds"), **row_of_data(self._read_if_there("data"))}
        found = flatten(parts)
        row |= {key: value for key, value in flat_config(self.config).items() if key not in asked}
        row |= {key: value for key, value in found.items() if key not in row} | dict(metrics)
        self.write("result", row)
        self.mark_done()
        self.close()
        return row

    def mark_done(self) -> None:
        """Remove the checkpoints of a `finished` run, as they hold the noise key, and write DONE if it is missing."""
        forget_checkpoints(self.folder)
        if not (self.folder / "DONE").is_file():
            write_text(self.folder / "DONE", self.read("result")["finished_at"] + "\n")

    def close(self) -> None:
        """Release the lock. The end of the process also releases it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read_if_there(self, name: str) -> dict[str, Any]:
        return self.read(name) if (self.folder / f"{name}.json").is_file() else {}

    def _checkpoints(self) -> list[Path]:
        """The last checkpoint and the one before it, if they exist."""
        return [path for path in (self.checkpoint, previous(self.checkpoint)) if path.is_file()]

    def _state(self) -> list[tuple[str, int]]:
        """The names and times of checkpoints, DONE and result.json. If they change, another process wrote here."""
        ends = [path for path in (self.folder / "DONE", self.folder / "result.json") if path.is_file()]
        return [(path.name, path.stat().st_mtime_ns) for path in (*self._checkpoints(), *ends)]

    def _clear(self) -> None:
        for name in ("DONE", "result.json"):  # first, so that a run that is half removed does not look done
            (self.folder / name).unlink(missing_ok=True)
        for entry in self.folder.iterdir():
            if entry.name != ".lock":
                remove(entry)


def neighbours_of(config: RunConfig) -> str:
    """What neighbouring data sets differ by: `data.holdout` and `data.train_limit` choose the examples of our tasks."""
    keys = () if config.own_task else ("holdout", "train_limit")
    chosen = " and ".join(f"data.{key}={value}" for key in keys if (value := getattr(config.data, key)))
    return f"one of the N examples that {chosen} left to train on" if chosen else "one training example"


PROMISED = ("private", "neighbours_differ_by", "earlier", "total")
"""The entries of privacy.json that are copied to an exported model, in addition to the plan."""


def provenance_of(record: RunRecord, description: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """The provenance of an exported model, from an explicit list of fields.

    The description of the data and all metrics are included only if the data are public, or no noise was added.
    Otherwise only metrics on held-out examples are; with `data.holdout`, which holds out a part of the training set,
    only those on the test set.
    """
    git, privacy = record.read("git"), record.read("privacy")
    provenance: dict[str, Any] = {
        "hash": record.hash,
        "config": stable_config(record.config),
        "git": {key: git[key] for key in ("sha", "dirty")},
        "privacy": privacy["plan"] | {name: privacy[name] for name in PROMISED if name in privacy},
    }
    if privacy["plan"]["noise_multiplier"] == 0.0 or record.config.data.public:
        return {**provenance, "data": dict(description), "metrics": dict(metrics)}
    elsewhere = HELD_OUT[1:] if record.config.data.holdout else HELD_OUT
    return {**provenance, "metrics": {key: value for key, value in metrics.items() if key.startswith(elsewhere)}}


def _altered(path: Path) -> str:
    return f"{path} is missing or was altered: restore it, or start afresh with overwrite=true."
