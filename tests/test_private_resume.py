"""A private training that ended early, by a failed step or for good, goes on to the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from groupwise import make_private
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import Private
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.private_use import BATCH, DATA, cross_entropy, network
from tests.test_private import MICROBATCH, SEED, STEPS, Augmented, Points, go_on, start, weights

AGAIN = NoiseSource.from_seed(99)
"""Of a training that loads the key of another."""


class Stop(Exception):
    """Stands for whatever ends a step."""


def stops(task: Any, at: int) -> tuple[Any, list[int]]:
    """The task's losses, which raise in their call of this number once a list holds the calls so far."""
    calls: list[int] = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if calls:
            calls[0] += 1
            if calls[0] == at:
                raise Stop
        return task.losses(model, batch)

    return losses, calls


def fail_in_the_third_step(private: Private, calls: list[int]) -> None:
    go_on(private, 2)
    calls.append(0)
    with pytest.raises(Stop):
        private.step()
    assert private.executed == 2


def same(one: Private, other: Private) -> None:
    assert one.executed == other.executed
    assert torch.equal(weights(one.model), weights(other.model))
    assert torch.equal(one.core.thresholds.clip_thresholds, other.core.thresholds.clip_thresholds)


@pytest.mark.parametrize("kind", [Points, Augmented])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:data is a DataLoader")
@pytest.mark.parametrize("loader", [False, True], ids=["dataset", "loader"])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(workers, loader, kind):
    def begin(**options: Any) -> Private:
        task = kind()
        losses, calls = stops(task, 3)
        began.append(calls)
        if not loader:
            return start(task, losses=losses, num_workers=workers, **options)
        data = DataLoader(task, batch_size=5, shuffle=True, num_workers=workers)
        return start(task, data=data, losses=losses, **options)

    began: list[list[int]] = []
    whole = begin()
    go_on(whole)
    killed = begin()
    fail_in_the_third_step(killed, began[-1])
    state = killed.state_dict()
    resumed = begin(noise_source=AGAIN)
    resumed.load_state_dict(state)
    assert resumed.executed == 2 and go_on(resumed) == STEPS - 2
    same(resumed, whole)
    began[1].clear()
    assert go_on(killed) == STEPS - 2
    same(killed, whole)


class Texts:
    """Texts of which few are long, and none of those that are traced: tokens, up to 4 of them for each call.

    So a batch of longer texts calls its layers more often than the plan has seen.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        sampled = set(np.linspace(0, 59, 12).round().astype(int).tolist())
        lengths = [4 if row in sampled or row % 7 else 5 + row % 11 for row in range(60)]
        self.rows = [torch.randint(1, 9, (length,)) for length in lengths]
        parts = {"embed": nn.Embedding(9, 4, padding_idx=0), "drop": nn.Dropout(0.3), "head": nn.Linear(4, 2)}
        self.model = nn.ModuleDict(parts).double()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        return self.rows[row]

    @staticmethod
    def collate(rows: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @staticmethod
    def losses(model: nn.Module, tokens: Tensor) -> Tensor:
        parts = [model["head"](model["drop"](model["embed"](part))) for part in tokens.split(4, 1)]
        losses = F.cross_entropy(torch.cat(parts, 1).flatten(0, 1), (tokens % 2).flatten(), reduction="none")
        return (losses.view_as(tokens) * (tokens > 0)).sum(1)


def texts(**options: Any) -> Private:
    task = Texts()
    return start(task, collate_fn=Texts.collate, **options)


def test_who_takes_examples_or_their_batch_apart_may_be_traced_again():
    def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return Texts.losses(model, batch.pop("tokens"))

    whole, task = texts(), Texts()
    data = [{"tokens": row} for row in task.rows]
    read = type("Read", (), {"__len__": lambda _: 60, "__getitem__": lambda _, row: dict(data[row])})()
    collate = lambda rows: {"tokens": Texts.collate([row.pop("tokens") for row in rows])}  # noqa: E731
    popped = start(task, data=read, losses=popping, collate_fn=collate)
    go_on(whole)
    go_on(popped)
    same(popped, whole)


def test_a_plan_that_grew_goes_on_to_the_same_bits():
    """Whether it grew before the state was taken or after, or all of it is known from the beginning."""
    whole = texts()
    few = len(whole.engine.plan.calls["Layer 'head'"])
    go_on(whole)
    assert few < len(whole.engine.plan.calls["Layer 'head'"]) > 2
    for steps in range(STEPS):
        killed, resumed = texts(), texts(noise_source=AGAIN)
        go_on(killed, steps)
        resumed.load_state_dict(killed.state_dict())
        assert resumed.engine.plan == killed.engine.plan
        go_on(resumed)
        same(resumed, whole)
    knowing = texts()
    knowing.engine.plan = whole.engine.plan
    go_on(knowing)
    same(knowing, whole)


def _grown_on_two(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor, bool]:
    whole, killed = texts(ranks=Ranks()), texts(ranks=Ranks())
    go_on(whole)
    go_on(killed, 2)
    killed.save(f"{folder}/private.pt")
    torch.distributed.barrier()
    resumed = texts(ranks=Ranks(), noise_source=AGAIN)
    resumed.load(f"{folder}/private.pt")
    go_on(resumed)
    return weights(whole.model), weights(resumed.model), killed.engine.plan == resumed.engine.plan


def test_replicas_whose_plans_grew_go_on_to_the_same_bits_from_the_state_of_the_first(tmp_path):
    found = run_ranks(_grown_on_two, 2, str(tmp_path))
    assert all(torch.equal(whole, resumed) for whole, resumed, _ in found)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_numbers_of_numpy_go_through_a_file_and_on_to_the_same_bits(number, tmp_path):
    def begin():
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=number(0.3), momentum=number(0.9))
        whole = {"steps": np.int64(4), "batch_size": np.int32(BATCH), "noise_source": NoiseSource.from_seed(SEED)}
        budget = {"noise_multiplier": number(1.1), "delta": number(1e-3), "threshold": number(0.7), "accountant": "rdp"}
        private = make_private(model, optimizer, DATA, cross_entropy, microbatch=np.int64(7), **whole, **budget)
        return private, torch.optim.lr_scheduler.ExponentialLR(optimizer, number(0.9))

    def train(private, schedule, steps=None):
        for _ in private.steps(steps):
            schedule.step()

    private, schedule = begin()
    train(private, schedule, 2)
    file = str(tmp_path / "training.pt")
    save_checkpoint(file, {"private": private.state_dict(), "scheduler": schedule.state_dict()})
    train(private, schedule)
    resumed, other = begin()
    saved = load_checkpoint(file)
    resumed.load_state_dict(saved["private"])
    other.load_state_dict(saved["scheduler"])
    train(resumed, other)
    assert torch.equal(weights(private.model), weights(resumed.model)) and resumed.executed == 4


def test_a_state_is_a_copy_that_later_steps_do_not_change():
    whole, killed, resumed = start(Points()), start(Points()), start(Points(), noise_source=AGAIN)
    go_on(whole)
    go_on(killed, 2)
    state = killed.state_dict()
    go_on(killed)
    resumed.load_state_dict(state)
    assert resumed.executed == 2
    go_on(resumed)
    same(resumed, whole)


def test_a_file_brings_a_training_back(tmp_path):
    whole, killed, resumed = start(Points()), start(Points()), start(Points(), noise_source=AGAIN)
    go_on(whole)
    go_on(killed, 2)
    killed.save(tmp_path / "private.pt")
    assert (tmp_path / "private.pt").stat().st_mode & 0o077 == 0, "it holds the key of the noise"
    resumed.load(str(tmp_path / "private.pt"))
    go_on(resumed)
    same(resumed, whole)


def test_the_microbatch_is_that_of_the_state_as_its_masks_are():
    whole, killed, resumed = start(Points()), start(Points()), start(Points(), noise_source=AGAIN, microbatch=3)
    go_on(whole)
    go_on(killed, 2)
    resumed.load_state_dict(killed.state_dict())
    go_on(resumed)
    same(resumed, whole)


def test_a_state_of_more_processes_is_refused():
    private = start(Points())
    state = private.state_dict() | {"processes": "2 processes"}
    with pytest.raises(UserError, match=r"made by 2 processes, but here are 1 process,"):
        start(Points()).load_state_dict(state)


def test_a_step_that_lacks_memory_is_begun_again_with_half_as_many_examples_and_resumes_so():
    def begin(**options: Any) -> tuple[Private, list[int]]:
        task, seen = Points(), []

        def losses(model: nn.Module, batch: Any) -> Tensor:
            seen.append(len(batch[0]))
            if len(batch[0]) > 5 and full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return task.losses(model, batch)

        return start(task, losses=losses, **options), seen

    full = False
    (killed, seen), (whole, _), (resumed, _) = begin(), begin(), begin(noise_source=AGAIN)
    for private in (killed, whole):
        go_on(private, 1)
    full = True
    seen.clear()
    go_on(killed, 1)
    assert seen[0] == MICROBATCH and set(seen[1:-1]) == {MICROBATCH // 2} and killed.state_dict()["microbatches"] == [3]
    go_on(whole)
    resumed.load_state_dict(killed.state_dict())
    go_on(resumed)
    same(resumed, whole)


def test_where_memory_is_short_fewer_examples_are_checked(capsys):
    task = Points()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return task.losses(model, batch)

    go_on(start(task, losses=losses), 1)
    assert "checking with 3 examples at once" in capsys.readouterr().err
