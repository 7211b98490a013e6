"""A run's folder, `results/runs/<hash>`: what lies in it, and when it counts as finished.

config.yaml   the resolved configuration      data.json     sha256 and counts of the data
config.hash   its hash, in full               seeds.json    every seed, and whether the noise had one
git.json      commit, dirty or not            privacy.json  plan, executed steps, epsilon
diff.patch    what was not committed          metrics.jsonl one line a record, {"step": ...}
environment.json                              system.json   wall time, throughput, peak memory
outputs-test.jsonl  texts that the model made, where it makes any
weights-<step>.pt   weights on the way, where train.keep asks for them
checkpoint.pt                                 result.json   one flat row with all of the above
DONE          written last: a folder without it does not exist for the analysis
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from groupwise.atomic import write_json, write_text
from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.training.identity import (
    config_hash,
    differences,
    flat_config,
    flatten,
    load_config,
    save_config,
)
from groupwise.training.provenance import environment, git_state


class RunRecord:
    """The record of one run. `open` looks, `begin` starts to write, `finish` closes it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        self.hash = config_hash(config)
        self._lock: IO[bytes] | None = None

    @classmethod
    def open(cls, config: RunConfig, resume: str | None = None) -> RunRecord:
        """The record of ``config``, or that in the folder ``resume`` (default: ``config.resume``).

        Writes nothing. Raises `UserError` when ``resume`` is no run or was made with another configuration
        (naming the keys that differ), or when nothing can be written there.
        """
        resume = resume or config.resume
        if resume is None:
            folder = Path(config.paths.results).expanduser() / "runs" / config_hash(config)[:12]
        else:
            folder = Path(resume).expanduser()
            if not folder.is_dir():
                raise UserError(f"resume={resume} is no folder: name one of {config.paths.results}/runs.")
            if differing := differences(load_config(folder / "config.yaml"), config):
                raise UserError(
                    f"resume={resume} was made with another configuration: {'; '.join(differing)}. "
                    "Give the same values, or leave resume out."
                )
        _refuse_unwritable(folder)
        return cls(folder, config)

    @property
    def finished(self) -> bool:
        """Is this run done already, with no wish to overwrite it?"""
        return (self.folder / "DONE").is_file() and not self.config.overwrite

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint lies, or will."""
        return self.folder / "checkpoint.pt"

    @property
    def resumable(self) -> bool:
        """Is there a checkpoint to go on from, other than one that overwrite=true will throw away?"""
        return self.checkpoint.is_file() and not (self.config.overwrite and self._lock is None)

    def git(self) -> dict[str, Any]:
        """Where the code came from: sha, dirty and more."""
        return self._read("git.json")

    def result(self) -> dict[str, Any]:
        """The flat row of a finished run."""
        return self._read("result.json")

    def begin(self) -> None:
        """Make the folder, take its lock, and write the configuration and where the code came from.

        Without a checkpoint, what an interrupted run left is cleared. Raises `UserError` when the folder
        cannot be written, or when another process is running the very same configuration.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if self.config.overwrite or not self.resumable:
                self._clear()
            write_text(self.folder / "config.yaml", save_config(self.config))
            write_text(self.folder / "config.hash", self.hash + "\n")
            self._write_provenance()
        except OSError as error:
            raise UserError(_unwritable(self.folder, error.strerror or str(error))) from error

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``<name>.json`` atomically (privacy, seeds, system, ...)."""
        write_json(self.folder / f"{name}.json", content)

    def write_outputs(self, outputs: Mapping[str, list[dict[str, Any]]]) -> None:
        """Write outputs-<split>.jsonl: the texts that the model made, one line each."""
        for split, rows in outputs.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text(self.folder / f"outputs-{split}.jsonl", lines)

    def write_data(self, description: Mapping[str, Any]) -> None:
        """Write data.json; raises `UserError` when a resumed run had other data."""
        written = json.loads(json.dumps(description))
        if self.resumable and (self.folder / "data.json").is_file() and self._read("data.json") != written:
            raise UserError(
                f"the data are not those that the run in {self.folder} began with: bring those back, or "
                "start afresh with overwrite=true."
            )
        self.write("data", written)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; it survives the death of the process."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without one that was cut off as it was written."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def cut_metrics(self, step: int) -> None:
        """On resume: forget what was logged after the checkpoint's ``step``: those steps are run again."""
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def finish(
        self, metrics: Mapping[str, Any], *, plan: Mapping[str, Any], system: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write system.json, result.json and, last, DONE; returns the flat row.

        ``metrics`` are the final ones (what is no private release is named ``nonprivate/...``), ``plan`` is
        ``PrivacyPlan.to_dict()`` with whatever else the row should say of the privacy, ``system`` holds
        wall_seconds, peak_memory_bytes, device and the like.
        """
        self.write("system", system)
        row: dict[str, Any] = {
            "hash": self.hash,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        row |= {
            key: value
            for key, value in flat_config(self.config).items()
            if key not in ("resume", "overwrite", "explain", "export")
        }
        git = {key: value for key, value in self.git().items() if key != "untracked"}
        parts = {"git": git, "plan": plan, "system": system, **self._read("environment.json")}
        for name in ("data", "seeds"):
            if (self.folder / f"{name}.json").is_file():
                parts[name] = {**self._read(f"{name}.json")}
        for key, value in flatten(parts).items():
            row.setdefault(key, value)
        row |= metrics
        self.write("result", row)
        write_text(self.folder / "DONE", row["finished_at"] + "\n")
        self.close()
        return row

    def close(self) -> None:
        """Give the lock back; the end of the process does it too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = open(self.folder / ".lock", "ab")  # noqa: SIM115 (held for as long as the run)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise UserError(
                f"another process is writing to {self.folder}, which is this very configuration: wait for it "
                "to end, or change something, such as the seed."
            ) from error
        except OSError:
            pass  # a file system without locks

    def _clear(self) -> None:
        (self.folder / "DONE").unlink(missing_ok=True)  # first: what is half cleared is not done
        for entry in self.folder.iterdir():
            if entry.name == ".lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _write_provenance(self) -> None:
        git = git_state()
        diff = git.pop("diff")
        if (self.folder / "git.json").is_file():
            before = self._read("git.json")
            git["started_from"] = before.get("started_from") or before["sha"]
        write_json(self.folder / "git.json", git)
        if diff:
            write_text(self.folder / "diff.patch", diff)
        write_json(self.folder / "environment.json", environment())


def _refuse_unwritable(folder: Path) -> None:
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise UserError(_unwritable(folder, f"{nearest} is a file"))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(_unwritable(folder, f"no permission to write in {nearest}"))


def _unwritable(folder: Path, reason: str) -> str:
    return f"the results folder {folder} cannot be written ({reason}): give another with paths.results=<folder>."
