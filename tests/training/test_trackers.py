"""Metrics are always written to the run's files, and also to another tracker if one is chosen."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupwise.config.checks import validate
from groupwise.config.schema import PathsConfig, RunConfig, TrackerConfig
from groupwise.errors import UserError
from groupwise.training.record import RunRecord
from groupwise.training.reports import BESIDE, FilesTracker


def begun(tmp_path: Path, tracker: str) -> RunRecord:
    record = RunRecord.open(RunConfig(paths=PathsConfig(results=str(tmp_path)), tracker=TrackerConfig(name=tracker)))
    record.begin()
    return record


def test_a_failing_tracker_is_dropped_with_one_warning_and_files_are_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError("server gone")

        def finish(self) -> None:
            raise ConnectionError("server gone")

    record = begun(tmp_path, "files")
    monkeypatch.setitem(BESIDE, "files", lambda record, step: Failing())
    tracker = FilesTracker(record)
    with pytest.warns(UserWarning, match="Failing failed .server gone."):
        tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 0.5})
    tracker.finish()
    assert len(record.metrics()) == 2


def test_a_tracker_that_is_not_installed_raises_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    record = begun(tmp_path, "wandb")
    with pytest.raises(UserError, match="tracker=files"):
        FilesTracker(record)


@pytest.mark.slow
def test_tensorboard_writes_events_into_the_runs_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = begun(tmp_path, "tensorboard")
    tracker = FilesTracker(record)
    for step in (1, 2, 3):
        tracker.log(step, {"valid_accuracy": step / 10})
    tracker.finish()
    resumed = FilesTracker(record, step=1)
    resumed.log(2, {"valid_accuracy": 0.9})
    resumed.finish()
    events = EventAccumulator(str(record.folder / "tensorboard")).Reload().Scalars("valid_accuracy")
    assert [(event.step, round(event.value, 3)) for event in events] == [(1, 0.1), (2, 0.9)]
    assert len(record.metrics()) == 4


def test_a_resumed_run_keeps_its_wandb_id_and_an_overwritten_one_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[object] = []
    fake = SimpleNamespace(init=lambda **given: ids.append(given["id"]), Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    record = begun(tmp_path, "wandb")
    FilesTracker(record)
    FilesTracker(record, step=3)
    record.close()
    record.config.overwrite = True
    again = RunRecord.open(record.config)
    again.begin()
    FilesTracker(again)
    first, resumed, overwritten = ids
    assert first == resumed != overwritten


@pytest.mark.slow
def test_wandb_works_offline_in_the_runs_folder(tmp_path: Path) -> None:
    record = begun(tmp_path, "wandb")
    tracker = FilesTracker(record)
    tracker.log(1, {"valid_accuracy": 0.1})
    tracker.finish()
    assert list((record.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert record.metrics() == [{"step": 1, "valid_accuracy": 0.1}]


def test_mlflow_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record = begun(tmp_path, "mlflow")
    for step in (1, 2):
        tracker = FilesTracker(record, step=step - 1)
        tracker.log(step, {"threshold/blocks.0": step / 10})
        tracker.finish()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("groupwise").experiment_id])
    history = client.get_metric_history(run.info.run_id, "threshold/blocks.0")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]
    assert run.data.params["clip.name"] == "adaptive_layer" and run.info.status == "FINISHED"


def test_a_missing_mlflow_is_refused_with_advice_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="tracker=mlflow needs the package mlflow: install it"):
        validate(RunConfig(tracker=TrackerConfig(name="mlflow")))
