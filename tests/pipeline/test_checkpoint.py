"""Checkpoints of a pipeline are complete even if a process fails, and any number of stages can read the weights."""

import io
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.errors import UserError
from groupwise.pipeline import checkpoint
from groupwise.pipeline.split import choose_ranges, cut
from groupwise.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import Case, make_model

WORLD, STAGES = 4, 2
CPU = torch.device("cpu")


def state_of(rank: int, step: int) -> dict[str, Any]:
    """A process's state, the same in both replicas."""
    return {"model": torch.full((2,), 10.0 * step + rank % STAGES)}


def saves(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run all checks in one start of four processes; return what this one observed."""
    ranks = Ranks(STAGES)
    path = Path(folder) / "checkpoint.pt"
    seen: dict[str, Any] = {}

    def load() -> tuple[int, list[float]]:
        state = checkpoint.load(path, ranks, CPU)
        return state["step"], state["model"].tolist()

    for step in (0, 3):
        checkpoint.save(path, state_of(rank, step), {"step": step, "noise_key": b"secret"}, ranks)
        ranks.barrier()
        seen[f"after {step}"] = load()
    seen["folders"] = sorted(entry.name for entry in Path(folder).iterdir())
    stage_file = Path(folder) / "checkpoint-3" / f"stage-{ranks.stage}.pt"
    seen["key in a stage's file"] = "noise_key" in load_checkpoint(stage_file)

    for harmed in (None, stage_file, path):
        if rank == 1 and harmed:
            content = harmed.read_bytes()
            harmed.write_bytes(content[:-1])
        ranks.barrier()
        with redirect_stderr(io.StringIO()) as stderr:
            _, newest = load_newest(path, partial(checkpoint.load, ranks=ranks, device=CPU), ranks)
        seen[f"newest without {harmed and harmed.name[:5]}"] = newest["step"], stderr.getvalue().count("warning: ")
        ranks.barrier()
        if rank == 1 and harmed:
            harmed.write_bytes(content)
        ranks.barrier()

    write = checkpoint.save_checkpoint
    for place in ("stage-1.pt", "checkpoint.pt"):

        def full(to: Path, state: dict[str, Any], *keep: Path, place: str = place) -> None:
            if to.name == place:
                raise UserError("the disk is full: make room.")
            write(to, state, *keep)

        checkpoint.save_checkpoint = full
        try:
            checkpoint.save(path, state_of(rank, 5), {"step": 5}, ranks)
        except UserError as error:
            seen[f"full at {place}"] = str(error)
        checkpoint.save_checkpoint = write
        seen[f"after full at {place}"] = load()
        ranks.barrier()

    model = make_model(Case())
    stage = cut(model, choose_ranges(model, STAGES), ranks.stage)
    checkpoint.save_weights(Path(folder) / "model.pt", stage.names, stage.state_dict(), ranks)
    checkpoint.LARGEST = 10
    checkpoint.save_weights(Path(folder) / "large.pt", stage.names, stage.state_dict(), ranks)
    return seen


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(saves, WORLD, str(folder))


def test_every_process_gets_its_own_state_back(ran):
    for rank, seen in enumerate(ran[1]):
        for step in (0, 3):
            assert seen[f"after {step}"] == (step, [10.0 * step + rank % STAGES] * 2)


def test_two_checkpoints_are_kept_and_the_key_is_in_no_stages_file(ran):
    for seen in ran[1]:
        assert seen["folders"] == ["checkpoint-0", "checkpoint-3", "checkpoint-previous.pt", "checkpoint.pt"]
        assert not seen["key in a stage's file"]


def test_an_altered_file_takes_all_stages_back_to_the_previous_checkpoint(ran):
    for rank, seen in enumerate(ran[1]):
        assert seen["newest without None"] == (3, 0)
        assert seen["newest without stage"] == seen["newest without check"] == (0, rank == 0)


@pytest.mark.parametrize("place", ["stage-1.pt", "checkpoint.pt"])
def test_a_failed_write_is_raised_by_all_and_keeps_the_last_checkpoint(ran, place):
    for seen in ran[1]:
        assert seen[f"full at {place}"] == "the disk is full: make room."
        assert seen[f"after full at {place}"] == seen["after 3"]


@pytest.mark.parametrize("name", ["model", "large"])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_any_number_of_stages_reads_the_weights(ran, name, stages):
    truth = make_model(Case()).state_dict()
    for index in range(stages):
        model = make_model(Case())
        stage = cut(model, choose_ranges(model, stages), index)
        for parameter in stage.parameters():
            torch.nn.init.zeros_(parameter)
        stage.load_state_dict(checkpoint.read_weights(ran[0] / f"{name}.pt", stage.names))
        assert all(torch.equal(tensor, truth[stage.names[key]]) for key, tensor in stage.state_dict().items())


def test_a_small_model_is_also_written_as_one_file(ran):
    truth = make_model(Case()).state_dict()
    written = load_checkpoint(ran[0] / "model.pt")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name]) for name in truth)
    assert not (ran[0] / "large.pt").exists()


def test_weights_of_another_model_are_refused(ran):
    with pytest.raises(UserError, match=r"model.pt has no other\.weight"):
        checkpoint.read_weights(ran[0] / "model.pt", {"weight": "other.weight"})
    with pytest.raises(UserError, match="has no other"):
        checkpoint.read_weights(ran[0] / "absent.pt", {"weight": "other.weight"})


class Alone:
    """The part of `Ranks` that reading needs."""

    replica, stage, stages = 0, 0, 2


def test_a_checkpoint_of_other_stages_or_without_a_file_is_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for stages, words in (
        (4, r"was written by 4 stages, not 2: give pipeline.stages=4"),
        (2, "There is no checkpoint"),
    ):
        save_checkpoint(path, {"stages": stages, "folder": "checkpoint-1"})
        with pytest.raises(UserError, match=words):
            checkpoint.load(path, Alone, CPU)
