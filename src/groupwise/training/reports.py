"""Reports metrics to files and a tracker during a run, and formats the lines that it prints at its end."""

import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text
from groupwise.config.identity import flat_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason
from groupwise.privacy.plan import folded
from groupwise.rows import METRICS
from groupwise.training.record import RunRecord


class WandbTracker:
    """Weights & Biases, offline by default. A resumed run continues its run there; overwrite=true starts a new one.

    The runs of a sweep are grouped under its name (by WANDB_RUN_GROUP, which wandb reads).
    """

    def __init__(self, record: RunRecord, step: int) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        config, path = record.config, record.folder / "wandb" / "id"
        if not path.is_file():
            _write_id(path, secrets.token_hex(6))
        self._run = wandb.init(
            project=config.tracker.project,
            mode=config.tracker.mode,  # type: ignore[arg-type]
            dir=str(record.folder),
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            config=flat_config(config),
            name=_run_name(config),
            tags=[config.scale],
            settings=wandb.Settings(console="off", init_timeout=30),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        folder = Path(self._run.settings.sync_dir)
        self._run.finish()
        if self._run.settings.mode == "offline":
            print(f"To send the run to Weights & Biases: wandb sync {folder}")


class TensorBoardTracker:
    """TensorBoard's event files in the run's folder. A resumed run hides the events after its checkpoint."""

    def __init__(self, record: RunRecord, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(record.folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class MlflowTracker:
    """MLflow, in <paths.results>/mlflow.db or at MLFLOW_TRACKING_URI. A resumed run continues its run there."""

    def __init__(self, record: RunRecord, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        config, path = record.config, record.folder / "mlflow" / "id"
        shared = record.folder.parents[1].absolute() / "mlflow.db"
        self._mlflow, self._uri = mlflow, os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{shared}"
        mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(config.tracker.project)
        known = path.read_text(encoding="utf-8") if path.is_file() else None
        run = mlflow.start_run(run_id=known, run_name=_run_name(config), tags={"scale": config.scale})
        if known is None:
            _write_id(path, run.info.run_id)
            mlflow.log_params(flat_config(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()
        print(f"To see the run in MLflow: mlflow ui --backend-store-uri {self._uri}")


def _write_id(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, text)


class FilesTracker:
    """Writes metrics to metrics.jsonl in the run's folder, and to the configured tracker.

    The caller names metrics without a guarantee ``nonprivate/...``. A tracker is imported only if it is used. If it
    fails during the run, there is one warning, and it gets no more metrics. `step` is that of the checkpoint from which
    the run resumes. Raises `UserError` if the tracker cannot start.
    """

    def __init__(self, record: RunRecord, step: int = 0) -> None:
        name = record.config.tracker.name
        self._record, self._beside = record, None
        if name not in BESIDE:
            return
        try:
            self._beside = BESIDE[name](record, step)
        except Exception as error:  # trackers raise errors of their own, of requests, and of sqlalchemy
            raise UserError(
                f"tracker={name} cannot start ({reason(error)}): use "
                f"{'tracker.mode=offline, or ' if name == 'wandb' else ''}tracker=files."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record.log(step, metrics)
        self._try(lambda tracker: tracker.log(step, metrics))

    def finish(self) -> None:
        self._try(lambda tracker: tracker.finish())

    def _try(self, act: Callable[[Any], None]) -> None:
        if self._beside is None:
            return
        try:
            act(self._beside)
        except Exception as error:
            name, self._beside = type(self._beside).__name__, None
            warnings.warn(f"{name} failed ({reason(error)}) and gets no more metrics; metrics.jsonl does", stacklevel=3)


BESIDE: dict[str, Callable[[RunRecord, int], Any]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
}


def _run_name(config: RunConfig) -> str:
    epsilon = config.privacy.epsilon
    budget = f"sigma {config.privacy.noise_multiplier:g}" if epsilon is None else f"eps {epsilon:g}"
    return f"{config.task} {config.model.name} {config.clip.name} {budget} seed {config.seed}"


def result_lines(row: Mapping[str, Any]) -> list[str]:
    """The lines that a run prints at its end, from its result row (`RunRecord.finish`); ε only if it trained."""
    figures = [
        f"{key}\xa0{value:.2f}"
        for key, value in row.items()
        if key.startswith(METRICS) and isinstance(value, int | float) and "loss" not in key and "nll" not in key
    ]
    text = "  ".join([*figures, f"in\xa0{row['system.wall_seconds']:.0f}\xa0s"])
    return [*_spent(row), *folded(text).splitlines()]


def _spent(row: Mapping[str, Any]) -> list[str]:
    if "plan.spent_epsilon" not in row:
        return []
    if not row["plan.noise_multiplier"]:
        return ["Spent: no noise was added, so this model has no privacy guarantee"]
    total = float(row.get("plan.total_epsilon", row["plan.spent_epsilon"]))
    known = not row["seeds.noise_is_secret"] or total == math.inf
    stamp = " (NOT PRIVATE)" if known else " (as published, not a guarantee)"
    text = f"epsilon {row['plan.spent_epsilon']:.4g} at delta {row['plan.delta']:g} in {row['plan.steps']} steps"
    lines = [f"Spent: {text}{'' if row['plan.private'] else stamp}"]
    if "plan.total_delta" in row:
        lines.append(f"With the runs of its starting weights: epsilon {total:.4g} at delta {row['plan.total_delta']:g}")
    return lines
