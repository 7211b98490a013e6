"""A session on two processes: the main one writes, and a stop signal to either stops both."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from groupwise.config.schema import PathsConfig, RunConfig
from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.private_step import PrivateStep
from groupwise.training.ranks import Ranks
from groupwise.training.record import RunRecord
from groupwise.training.step import Trainer
from groupwise.training.train import train
from tests.pipeline.ranks import run_ranks
from tests.tiny_training import ADAPTIVE_LAYER
from tests.training.data_parallel import BATCHES, PointsTask, build


def session(folder, ranks, stops=False, resumes=False):
    """One session in `folder`; return its row, or "stopped" if it was interrupted."""
    config = RunConfig(paths=PathsConfig(results=str(folder)))
    config.train.batch_size, config.train.checkpoint_every, config.eval.batch_size = 8, 3600, 8
    trainer = build(ADAPTIVE_LAYER, ranks, sigma=1.0, task=PointsTask())
    take = trainer.step

    def stopped(step):
        parts = take(step)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return parts

    if stops:
        trainer.step = stopped
    record = RunRecord.open(config)
    state = load_checkpoint(record.checkpoint) if resumes else {}
    if resumes:
        trainer.load_state_dict(state)
    if ranks.main:
        record.begin()
    try:
        return train(record, trainer, state)
    except KeyboardInterrupt:
        return "stopped"
    finally:
        record.close()


def _two(rank, world, folder):
    ranks, folder, messages = Ranks(), Path(folder), []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (
        messages.append(tensor.numel()),
        all_reduce(tensor, *args, **kwargs),
    )
    whole = session(folder / "whole", ranks)
    dist.all_reduce = all_reduce
    stopped = session(folder / "stopped", ranks, stops=rank == 1)
    ranks.barrier()  # the checkpoint is written
    return whole, messages, stopped, session(folder / "stopped", ranks, resumes=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    processes = run_ranks(_two, 2, str(folder))
    folders = {name: next((folder / name / "runs").iterdir()) for name in ("whole", "stopped")}
    return processes, folders


def test_the_main_process_alone_returns_the_row_and_writes_the_record(found, tmp_path):
    (first, second), folders = found
    assert first[0]["valid/loss"] > 0 and second[0] == {}
    steps = [json.loads(line)["step"] for line in (folders["whole"] / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4]
    assert not (folders["whole"] / "checkpoint.pt").exists() and (folders["whole"] / "DONE").exists()
    alone = session(tmp_path, Ranks())
    losses = {key: alone[key] for key in ("valid/loss", "nonprivate/train_loss")}
    assert losses == {key: pytest.approx(first[0][key], rel=1e-9) for key in losses}
    logged = [(folder / "metrics.jsonl").read_text() for folder in (folders["whole"], *(tmp_path / "runs").iterdir())]
    for there, here in zip(*(map(json.loads, lines.splitlines()) for lines in logged), strict=True):
        assert there.keys() == here.keys()
        assert {**there, "seconds": 0} == pytest.approx({**here, "seconds": 0}, rel=1e-9)


def test_a_step_sends_the_gradients_and_one_small_message(found):
    processes, _ = found
    size = sum(parameter.numel() for parameter in PointsTask().model.parameters())
    for _, messages, _, _ in processes:
        assert messages == [size + 3 * 8, 4] * len(BATCHES)  # counts, C, C² of 8 groups; flags, loss, dropped


def test_a_stop_that_reaches_one_process_stops_both_after_the_same_step(found):
    processes, folders = found
    assert [process[2] for process in processes] == ["stopped", "stopped"]
    assert processes[0][3]["plan.steps"] == len(BATCHES)
    steps = [json.loads(line)["step"] for line in (folders["stopped"] / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4]
    logged = [json.loads(line) for line in (folders["whole"] / "metrics.jsonl").read_text().splitlines()]
    assert [row["nonprivate/clipped"] for row in logged[:4] if not row["nonprivate/batch_size"]] == [0.0]
    whole, resumed = (torch.load(folders[name] / "model.pt") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def _interrupt(self, *_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it goes on")


def _out_of_memory(self, *_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("evaluate", "error"), [(_interrupt, None), (_out_of_memory, torch.OutOfMemoryError)])
def test_a_run_resumes_with_an_interrupted_last_evaluation_alone(evaluate, error, tmp_path, monkeypatch):
    whole = session(tmp_path / "whole", Ranks())
    speed = whole["system.wall_seconds"] * whole["system.examples_per_second"]
    assert speed == pytest.approx(8 * len(BATCHES)), "of expected batches, as drawn sizes are private"
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(PointsTask, "evaluate", evaluate)
        if error is None:
            assert session(tmp_path / "broken", Ranks()) == "stopped"
        else:
            with pytest.raises(error):
                session(tmp_path / "broken", Ranks())
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(Trainer, "step", None)  # nothing is trained again
    row = session(tmp_path / "broken", Ranks(), resumes=True)
    assert row["plan.replayed_steps"] == 0 and row["system.examples_per_second"] > 0
    assert row["valid/loss"] == whole["valid/loss"]
    models = [torch.load(next((tmp_path / name / "runs").iterdir()) / "model.pt") for name in ("whole", "broken")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize(("error", "words"), [(-1, "released 0 of"), (+1, "released 5 of|spent epsilon")])
def test_the_record_accounts_for_exactly_the_released_steps(error, words, tmp_path, monkeypatch):
    step = PrivateStep.step

    def miscounted(self):
        released = step(self)
        self.executed += error if self.executed == (1 if error < 0 else 4) else 0
        return released

    session(tmp_path / "counted", Ranks())
    [folder] = (tmp_path / "counted" / "runs").iterdir()
    privacy = json.loads((folder / "privacy.json").read_text())
    assert privacy["executed_steps"] == privacy["spent"]["executed_steps"] == privacy["plan"]["steps"] == 4
    monkeypatch.setattr(PrivateStep, "step", miscounted)
    with pytest.raises(UserError, match=words):
        session(tmp_path / "miscounted", Ranks())
    [folder] = (tmp_path / "miscounted" / "runs").iterdir()
    assert not (folder / "DONE").exists() and not (folder / "model.pt").exists()


@pytest.mark.parametrize("altered", ["data.json", "metrics.jsonl", "privacy.json", None])
def test_an_altered_record_is_refused_before_any_other_file_changes(tmp_path, altered):
    assert session(tmp_path, Ranks(), stops=True) == "stopped"
    (folder,) = (tmp_path / "runs").iterdir()
    if altered:
        (folder / altered).write_text("[]\n")
    else:
        (folder / "metrics.jsonl").unlink()
    rewritten = ("command.txt", "config.yaml", "git.json", "environment.json", "diff.patch")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in rewritten}
    with pytest.raises(UserError, match="missing or was altered"):
        session(tmp_path, Ranks(), resumes=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in rewritten} == before


@pytest.mark.parametrize("name", ["weights-3.pt", "weights-3-0.pt"])
def test_kept_weights_are_not_replaced_when_steps_are_replayed(tmp_path, monkeypatch, name):
    monkeypatch.setattr("groupwise.training.train.kept_steps", lambda *_: {1, 3, 4})
    assert session(tmp_path, Ranks(), stops=True) == "stopped"
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "weights-3.pt").exists()
    (folder / name).write_bytes(b"of the first time")  # then it was killed
    session(tmp_path, Ranks(), resumes=True)
    assert {file.name for file in folder.glob("weights*")} == {"weights-1.pt", name, "weights-4.pt"}
    assert (folder / name).read_bytes() == b"of the first time"


def test_kept_weights_are_those_of_a_checkpoint(tmp_path, monkeypatch):
    def killed(self, path):
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.training.train.kept_steps", lambda *_: {3})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_model", killed)
        assert session(tmp_path, Ranks()) == "stopped"
    (folder,) = (tmp_path / "runs").iterdir()
    state = load_checkpoint(folder / "checkpoint.pt")
    assert state["step"] == 3
    session(tmp_path, Ranks(), resumes=True)
    kept = torch.load(folder / "weights-3.pt")
    assert all(torch.equal(kept[name], value) for name, value in state["model"].items())


def test_a_signal_during_the_last_checkpoint_stops_the_run(tmp_path, monkeypatch):
    save = Trainer.save

    def interrupted(self, *given):
        save(self, *given)
        if self.private.executed == len(BATCHES):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "save", interrupted)
    assert session(tmp_path, Ranks()) == "stopped"
