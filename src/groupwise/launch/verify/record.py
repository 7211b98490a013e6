"""The files of a run's folder, as they lie there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.errors import UserError
from groupwise.training.identity import LATER, VOLATILE, flatten


@dataclass(frozen=True)
class Record:
    """A finished run. What is read is what the files say; a file that cannot be read raises as `json` and `open` do."""

    folder: Path
    data: Path | None = None
    """Where its data lie now, if not where the run had them."""

    @classmethod
    def open(cls, folder: Path, data: Path | None = None) -> Record:
        """Raises `UserError` where that is no finished run."""
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder: name one of results/runs.")
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is no run: it has no config.yaml.")
        if not (folder / "DONE").is_file():
            raise UserError(f"{folder} is no finished run, having no DONE: run the same command to its end first.")
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
        """What the hash is of."""
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
        """Was nothing trained (`eval.shots`)? There is then no plan, and no metrics.jsonl."""
        return self.config.get("eval.shots") is not None
