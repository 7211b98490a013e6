"""Sends metrics to a run's own files, always, and to one tracker beside them if asked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Protocol

from groupwise.config.identity import flat_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.training.record import RunRecord


class Tracker(Protocol):
    """Takes numbers by step; what is no private release is named ``nonprivate/...`` by the caller."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


def make_tracker(config: RunConfig, record: RunRecord, step: int = 0) -> Tracker:
    """The files of ``record``, with ``config.tracker`` beside them, from the checkpoint's ``step`` on.

    Call it after ``record.begin()``. wandb and tensorboard are imported only when they are asked for; raises
    `UserError` when that fails.
    """
    files = FilesTracker(record)
    if config.tracker.name == "wandb":
        return Beside(files, WandbTracker(config, record))
    if config.tracker.name == "tensorboard":
        return Beside(files, TensorBoardTracker(record, step))
    return files


class FilesTracker:
    """metrics.jsonl in the run's folder."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record.log(step, metrics)

    def finish(self) -> None:
        """Nothing is left open."""


class WandbTracker:
    """Weights & Biases, offline by default; its id is the run's hash, so a resumed run goes on there.

    The runs of a sweep are a group of that name (WANDB_RUN_GROUP, which wandb reads itself).
    """

    def __init__(self, config: RunConfig, record: RunRecord) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb

            self._run = wandb.init(
                project=config.tracker.project,
                mode=config.tracker.mode,  # type: ignore[arg-type]
                dir=str(record.folder),
                id=record.hash[:12],
                resume="allow",
                config=flat_config(config),
                name=f"{config.task} {config.model.name} {config.clip.name} {_budget(config)} seed {config.seed}",
                tags=[config.scale],
                settings=wandb.Settings(console="off", init_timeout=30),
            )
        except Exception as error:  # wandb raises of its own, of requests and of the service's kinds
            raise UserError(
                f"tracker=wandb cannot start in mode {config.tracker.mode} ({_one_line(error)}): "
                "use tracker.mode=offline, or tracker=files."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard's event files in the run's folder; a resumed run hides what came after its checkpoint."""

    def __init__(self, record: RunRecord, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"tracker=tensorboard is not installed ({_one_line(error)}): pip install tensorboard, or "
                "use tracker=files."
            ) from error
        self._writer = SummaryWriter(str(record.folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class Beside:
    """The files, and a tracker that may fail: then it is dropped with one warning, and the run goes on."""

    def __init__(self, files: Tracker, other: Tracker) -> None:
        self._files = files
        self._other: Tracker | None = other

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._files.log(step, metrics)
        if self._other is not None:
            try:
                self._other.log(step, metrics)
            except Exception as error:
                self._drop(error)

    def finish(self) -> None:
        self._files.finish()
        if self._other is not None:
            try:
                self._other.finish()
            except Exception as error:
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        name = type(self._other).__name__
        warnings.warn(f"{name} failed ({_one_line(error)}) and is dropped; the files keep everything", stacklevel=3)
        self._other = None


def _budget(config: RunConfig) -> str:
    epsilon = config.privacy.epsilon
    return f"sigma {config.privacy.noise_multiplier:g}" if epsilon is None else f"eps {epsilon:g}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
