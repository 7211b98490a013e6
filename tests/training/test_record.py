"""The folder of a run: its files, how it is resumed and locked, and what is refused."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from groupwise.config.identity import config_hash, load_config
from groupwise.config.schema import ClipConfig, PathsConfig, RunConfig
from groupwise.errors import UserError, environment_errors
from groupwise.training.checkpoint import forget_checkpoints, previous, save_checkpoint
from groupwise.training.provenance import git_state
from groupwise.training.record import RunRecord

PLAN = {"noise_multiplier": 3.1, "epsilon": 8.0, "num_groups": 16}
SYSTEM = {"wall_seconds": 12.5, "peak_memory_bytes": 10**9, "device": "cpu"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(paths=PathsConfig(results=str(tmp_path / "results")))


def begun(config: RunConfig) -> RunRecord:
    record = RunRecord.open(config)
    record.begin()
    return record


def finished(config: RunConfig) -> RunRecord:
    record = begun(config)
    record.log(1, {"nonprivate/train_loss": 2.0})
    save_checkpoint(record.checkpoint, {"step": 1})
    record.finish({"test_accuracy": 0.5}, plan=PLAN, system=SYSTEM)
    return record


def test_begin_writes_configuration_and_provenance(config: RunConfig) -> None:
    record = begun(config)
    assert load_config(record.folder / "config.yaml") == config
    assert (record.folder / "config.hash").read_text().strip() == config_hash(config)
    assert "sha" in json.loads((record.folder / "git.json").read_text())
    assert "torch" in json.loads((record.folder / "environment.json").read_text())["versions"]
    assert not record.finished


def test_the_row_is_flat_and_carries_its_provenance(config: RunConfig) -> None:
    record = begun(config)
    record.write_data({"source": "digits", "sha256": {"images": "ab"}, "train_examples": 1437})
    record.write("seeds", {"seed": 0, "noise_is_secret": True})
    row = record.finish({"test_accuracy": np.float32(0.5), "nonprivate/train_loss": 1.0}, plan=PLAN, system=SYSTEM)
    assert row["hash"] == config_hash(config)
    assert (row["clip.name"], row["scale"], row["privacy.delta"]) == ("adaptive_layer", "paper", 1e-5)
    assert (row["plan.noise_multiplier"], row["system.wall_seconds"]) == (3.1, 12.5)
    assert (row["nonprivate/data.sha256.images"], row["data.train_examples"]) == ("ab", 1437)
    assert row["seeds.noise_is_secret"] is True
    assert {"git.sha", "git.dirty", "versions.torch", "cpu_count", "platform"} <= set(row)
    assert row["data.name"] == "cifar10"  # the configuration's, not that of the data's description
    assert json.loads((record.folder / "result.json").read_text()) == {**row, "test_accuracy": 0.5}
    assert not any(isinstance(value, dict | list) for value in row.values())


def test_overwrite_starts_from_the_beginning(config: RunConfig) -> None:
    folder = finished(config).folder
    config.overwrite = True
    record = RunRecord.open(config)
    assert (record.folder, record.finished, record.resumable) == (folder, False, False)
    record.begin()
    assert not (folder / "DONE").exists() and not (folder / "metrics.jsonl").exists()
    save_checkpoint(record.checkpoint, {"step": 1})
    assert record.resumable  # the new run's own checkpoint


def test_a_truncated_line_of_metrics_is_dropped(config: RunConfig) -> None:
    record = begun(config)
    record.log(1, {"loss": 1.0})
    with open(record.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in record.metrics()] == [1]
    record.cut_metrics(2)
    record.log(2, {"loss": 0.5})
    assert [row["step"] for row in record.metrics()] == [1, 2]


def test_another_process_with_the_same_configuration_is_refused(config: RunConfig) -> None:
    first = begun(config)
    with pytest.raises(UserError, match="Another process"):
        begun(config)
    first.close()
    begun(config)


def test_resume_with_another_configuration_names_what_differs(config: RunConfig) -> None:
    folder = begun(config).folder
    other = RunConfig(seed=1, clip=ClipConfig(threshold=0.5), paths=config.paths, resume=str(folder))
    with pytest.raises(UserError) as refused:
        RunRecord.open(other)
    assert "seed is 0 there and 1 here" in str(refused.value)
    assert "clip.threshold is 1.0 there and 0.5 here" in str(refused.value)


def test_resume_takes_the_folder_it_is_given(config: RunConfig, tmp_path: Path) -> None:
    first = begun(config)
    save_checkpoint(first.checkpoint, {"step": 1})
    first.close()
    moved = tmp_path / "moved"
    first.folder.rename(moved)
    config.resume = str(moved)
    record = begun(config)
    assert record.folder == moved
    assert record.resumable


@pytest.mark.parametrize("what", ["absent", "empty"])
def test_resume_from_a_folder_without_a_run_is_refused(config: RunConfig, tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    config.resume = str(tmp_path / what)
    with pytest.raises(UserError, match=r"is not a folder|not a run's config"):
        RunRecord.open(config)


def test_other_data_on_resume_are_refused(config: RunConfig) -> None:
    first = begun(config)
    first.write_data({"sha256": {"images": "ab"}})
    save_checkpoint(first.checkpoint, {"step": 1})
    first.close()
    record = begun(config)
    record.write_data({"sha256": {"images": "ab"}})
    with pytest.raises(UserError, match="data are not those"):
        record.write_data({"sha256": {"images": "cd"}})


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_state_tells_a_clean_checkout_from_a_changed_one(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"sha": None, "dirty": None, "untracked": [], "diff": ""}
    git(tmp_path, "init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["sha"]) == 40
    assert (clean["dirty"], clean["diff"]) == (False, "")
    (tmp_path / "code.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("")
    changed = git_state(tmp_path)
    assert (changed["sha"], changed["dirty"], changed["untracked"]) == (clean["sha"], True, ["new.py"])
    assert "+x = 2" in changed["diff"]


def test_a_folder_inside_another_checkout_has_no_git_state(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "inner").mkdir()
    assert git_state(tmp_path / "inner")["sha"] is None


def test_files_that_may_hold_the_key_are_removed_before_done_is_written(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(config)
    for step in (1, 2):
        save_checkpoint(record.checkpoint, {"step": step}, keep=previous(record.checkpoint))
    (record.folder / ".checkpoint.pt.x.partial").write_bytes(b"half of it")
    seen: list[list[str]] = []
    replace = os.replace

    def spy(a: str, b: Path) -> None:
        if Path(b).name == "DONE":
            seen.append([path.name for path in record.folder.iterdir() if "checkpoint" in path.name])
        replace(a, b)

    monkeypatch.setattr(os, "replace", spy)
    record.finish({}, plan=PLAN, system=SYSTEM)
    assert seen == [[]]


def test_a_run_that_was_killed_just_before_done_is_finished(config: RunConfig) -> None:
    folder = finished(config).folder
    when = (folder / "DONE").read_text()
    (folder / "DONE").unlink()
    record = RunRecord.open(config)
    assert record.finished
    record.mark_done()
    assert (folder / "DONE").read_text() == when


def test_a_run_that_is_half_removed_is_not_finished(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(entry: Path) -> None:
        raise KeyboardInterrupt

    finished(config)
    monkeypatch.setattr("groupwise.training.record.remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunRecord.open(replace(config, overwrite=True)).begin()
    assert not RunRecord.open(config).finished


def test_a_checkpoint_is_removed_before_the_folders_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint.pt").touch()
    removed: list[str] = []
    monkeypatch.setattr("groupwise.training.checkpoint.remove", lambda entry: removed.append(entry.name))
    forget_checkpoints(tmp_path)
    assert removed == ["checkpoint.pt", "checkpoint-4"]


def test_a_run_with_a_result_and_a_checkpoint_is_not_finished(config: RunConfig) -> None:
    folder = finished(config).folder
    (folder / "DONE").unlink()
    save_checkpoint(folder / "checkpoint.pt", {"step": 1})
    record = RunRecord.open(config)
    assert not record.finished and record.resumable
    record.begin()
    assert not (folder / "result.json").exists()


def test_the_previous_checkpoint_is_enough_and_replaces_the_last(config: RunConfig) -> None:
    first = begun(config)
    last, before = first.checkpoint, previous(first.checkpoint)
    for step in (1, 2):
        save_checkpoint(last, {"step": step}, keep=before)
    content = before.read_bytes()
    first.close()
    record = RunRecord.open(config)
    record.begin(before)
    assert last.read_bytes() == content and not before.exists()
    record.close()
    last.rename(before)
    assert RunRecord.open(config).resumable


def test_partial_files_of_a_killed_write_are_removed_on_resume(config: RunConfig) -> None:
    first = begun(config)
    save_checkpoint(first.checkpoint, {"step": 1})
    (first.folder / ".checkpoint.pt.abc.partial").write_bytes(b"half a key")
    first.close()
    record = begun(config)
    assert record.checkpoint.exists() and not list(record.folder.glob(".*.partial"))


@pytest.mark.parametrize("what", ["finished", "has a newer checkpoint"])
def test_begin_is_refused_if_another_process_changed_the_run_after_open(config: RunConfig, what: str) -> None:
    first = begun(config)
    save_checkpoint(first.checkpoint, {"step": 1})
    second = RunRecord.open(config)
    if what == "finished":
        first.finish({}, plan=PLAN, system=SYSTEM)
    else:
        save_checkpoint(first.checkpoint, {"step": 2}, keep=previous(first.checkpoint))
        first.close()
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    with pytest.raises(UserError, match="just now: run the same command again"):
        second.begin()
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before


def test_a_full_disk_raises_a_user_error(config: RunConfig) -> None:
    record = begun(config)
    (record.folder / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"^the disk: No space left on device; fix that"), environment_errors():
        record.log(1, {"loss": 1.0})


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": "one"}', "\xff\xfe"])
def test_altered_metrics_are_refused(config: RunConfig, line: str) -> None:
    record = begun(config)
    (record.folder / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match="missing or was altered"):
        record.metrics()


def test_replayed_steps_add_up_over_kills_between_two_checkpoints(config: RunConfig) -> None:
    first = begun(config)
    save_checkpoint(first.checkpoint, {"step": 3})
    for step in range(1, 7):
        first.log(step, {})
    assert first.replayed(3) == 3
    first.write("privacy", {"replayed_steps": 3})
    first.cut_metrics(3)
    for step in (4, 5):
        first.log(step, {})
    assert first.replayed(3) == 5


def test_the_evaluation_at_the_end_is_not_logged_twice(config: RunConfig) -> None:
    record = begun(config)
    for row in ({"loss": 1.0}, {"valid/accuracy": 50.0}):
        record.log(4, row)
    record.cut_metrics(4)
    assert record.metrics() == [{"step": 4, "loss": 1.0}]


def test_a_truncated_result_raises_a_user_error(config: RunConfig) -> None:
    record = finished(config)
    (record.folder / "result.json").write_text('{"hash": ')
    with pytest.raises(UserError, match=r"result\.json is missing or was altered"):
        RunRecord.open(config).read("result")
