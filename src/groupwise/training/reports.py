"""Shows a run while it trains and at its end: how far it is on a terminal, metrics in its files and by one tracker."""

from __future__ import annotations

import os
import secrets
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from groupwise.atomic import write_text
from groupwise.config.identity import flat_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.privacy.plan import WIDTH
from groupwise.rows import METRICS
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
    if config.tracker.name == "wandb":
        return FilesTracker(record, WandbTracker(config, record))
    if config.tracker.name == "tensorboard":
        return FilesTracker(record, TensorBoardTracker(record, step))
    return FilesTracker(record)


class FilesTracker:
    """metrics.jsonl in the run's folder, and a tracker beside it; one that fails is dropped, with one warning."""

    def __init__(self, record: RunRecord, beside: Tracker | None = None) -> None:
        self._record, self._beside = record, beside

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record.log(step, metrics)
        self._try(lambda tracker: tracker.log(step, metrics))

    def finish(self) -> None:
        self._try(lambda tracker: tracker.finish())

    def _try(self, act: Callable[[Tracker], None]) -> None:
        if self._beside is None:
            return
        try:
            act(self._beside)
        except Exception as error:
            name, self._beside = type(self._beside).__name__, None
            warnings.warn(f"{name} failed ({_one_line(error)}) and is dropped; the files keep everything", stacklevel=3)


class WandbTracker:
    """Weights & Biases, offline by default; its id lies in the run's folder, so a resumed run goes on there, and one
    that began anew (overwrite=true) is another.

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
                id=_wandb_id(record.folder),
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


def _wandb_id(folder: Path) -> str:
    path = folder / "wandb" / "id"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        write_text(path, secrets.token_hex(6))
    return path.read_text(encoding="utf-8")


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


def _budget(config: RunConfig) -> str:
    epsilon = config.privacy.epsilon
    return f"sigma {config.privacy.noise_multiplier:g}" if epsilon is None else f"eps {epsilon:g}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Progress:
    """A bar on a terminal, and elsewhere (a log file, a cluster) a line now and then.

    ``epsilon`` maps executed steps to the budget spent so far (``PrivacyPlan.progress``); None shows none.
    ``start`` is the step that a resumed run goes on from. Use it as a context manager.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        epsilon: Callable[[int], float] | None = None,
        target_epsilon: float = float("inf"),
        seconds_between_lines: float = 15.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self._start = self._step = start
        self._epsilon = epsilon
        self._target = target_epsilon
        self._between = seconds_between_lines
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = self._last_line = clock()
        self._examples = 0
        self._note = ""
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=steps, initial=start, file=self._stream, unit="step", dynamic_ncols=True)

    def update(self, step: int, examples: int, note: str = "") -> None:
        """``step`` steps are done, the last of them on ``examples`` examples; ``note`` (accuracy, say) stays
        on view."""
        self._examples += examples
        self._note = note or self._note
        advanced, self._step = step - self._step, step
        if self._bar is not None:
            self._bar.set_postfix_str(self._state(), refresh=False)
            self._bar.update(advanced)
        elif step >= self.steps or self._clock() - self._last_line >= self._between:
            self._last_line = self._clock()
            left = _duration(self._seconds() / max(step - self._start, 1) * (self.steps - step))
            print(f"step {step}/{self.steps}  {self._state()}  {left} left", file=self._stream, flush=True)

    @property
    def examples_per_second(self) -> float:
        """Throughput of this process since it began."""
        return self._examples / max(self._seconds(), 1e-9)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds(self) -> float:
        return self._clock() - self._began

    def _state(self) -> str:
        parts = [f"{self.examples_per_second:.0f} examples/s"]
        if self._epsilon is not None:
            parts.insert(0, f"ε {self._epsilon(self._step):.2f} of {self._target:g}")
        return "  ".join([*parts, self._note] if self._note else parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def result_lines(row: Mapping[str, Any]) -> list[str]:
    """The lines that a run ends with, from its result row (`RunRecord.finish`); a run that trained nothing spent
    nothing."""
    figures = [
        f"{key}\xa0{value:.2f}"
        for key, value in row.items()
        if key.startswith(METRICS) and isinstance(value, int | float) and "loss" not in key and "nll" not in key
    ]
    told = "  ".join([*figures, f"in\xa0{row['system.wall_seconds']:.0f}\xa0s"])
    reached = textwrap.fill(told, WIDTH, subsequent_indent="  ").replace("\xa0", " ")
    return [*_spent(row), *reached.splitlines()]


def _spent(row: Mapping[str, Any]) -> list[str]:
    if "plan.spent_epsilon" not in row:
        return []
    if not row["plan.noise_multiplier"]:
        return ["Spent: no noise was added; this model has no privacy guarantee"]
    stamp = " (as published, not a guarantee)" if row["seeds.noise_is_secret"] else " (NOT PRIVATE)"
    told = f"epsilon {row['plan.spent_epsilon']:.4g} at delta {row['plan.delta']:g} in {row['plan.steps']} steps"
    return [f"Spent: {told}{'' if row['plan.private'] else stamp}"]
