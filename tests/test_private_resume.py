"""A private training that was interrupted resumes, and ends with the same bits as an uninterrupted one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from groupwise import make_private
from groupwise.clipping import by_mapping, per_layer
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import Private
from groupwise.private.data import READ
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.private_use import BATCH, DATA, cross_entropy, network
from tests.test_private import MICROBATCH, SEED, STEPS, Augmented, Points, go_on, start, weights

REPLACED = NoiseSource.from_seed(99)
"""The noise source of a resumed training, which the loaded state replaces."""


class Stop(Exception):
    """Stands for any error that ends a step."""


def stops(task: Any, at: int) -> tuple[Any, list[int]]:
    """The task's losses, and a list: once it holds a 0, the losses raise `Stop` in the call with this number."""
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
    assert all(parameter.grad is None for parameter in private.model.parameters()), "no sums are left"


def same(one: Private, other: Private) -> None:
    assert one.executed == other.executed
    assert torch.equal(weights(one.model), weights(other.model))
    assert torch.equal(one.core.thresholds.clip_thresholds, other.core.thresholds.clip_thresholds)


@pytest.mark.parametrize("kind", [Points, Augmented])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:data is a DataLoader")
@pytest.mark.parametrize("loader", [False, True], ids=["dataset", "loader"])
def test_an_interrupted_training_resumes_to_the_same_bits(workers, loader, kind):
    def begin(**options: Any) -> Private:
        task = kind()
        losses, calls = stops(task, 3)
        began.append(calls)
        if not loader:
            return start(task, losses=losses, num_workers=workers, **options)
        data = DataLoader(task, batch_size=5, shuffle=True, num_workers=workers)
        return start(task, data=data, losses=losses, **options)

    began: list[list[int]] = []
    expected = begin()
    go_on(expected)
    killed = begin()
    fail_in_the_third_step(killed, began[-1])
    state = killed.state_dict()
    began[1].clear()
    assert go_on(killed) == STEPS - 2
    same(killed, expected)
    for _ in range(2):
        resumed = begin(noise_source=REPLACED, microbatch=3)  # masks depend on that of the state
        resumed.load_state_dict(state)  # a copy, which no steps change
        assert resumed.executed == 2 and go_on(resumed) == STEPS - 2
        same(resumed, expected)


class Texts:
    """Texts of tokens, whose layers are called once for each 4 tokens. Few texts are longer, and none of those traced.

    So a batch with a longer text calls the layers more often than the engine's plan expects.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        read = set(np.linspace(0, 599, READ).round().astype(int).tolist())
        lengths = [4 if row in read or row % 7 else 5 + row % 11 for row in range(600)]
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


def test_losses_and_collate_fn_that_modify_their_input_may_be_traced_again():
    def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return Texts.losses(model, batch.pop("tokens"))

    expected, task = texts(), Texts()
    data = [{"tokens": row} for row in task.rows]
    read = type("Read", (), {"__len__": lambda _: 600, "__getitem__": lambda _, row: dict(data[row])})()
    collate = lambda rows: {"tokens": Texts.collate([row.pop("tokens") for row in rows])}  # noqa: E731
    popped = start(task, data=read, losses=popping, collate_fn=collate)
    go_on(expected)
    go_on(popped)
    same(popped, expected)


def test_a_training_with_an_extended_plan_resumes_to_the_same_bits():
    """Whether it was extended before or after the state was taken, or was complete from the beginning."""
    expected = texts()
    calls = len(expected.engine.plan.calls["Layer 'head'"])
    go_on(expected)
    assert calls < len(expected.engine.plan.calls["Layer 'head'"]) > 2
    for steps in range(STEPS):
        killed, resumed = texts(), texts(noise_source=REPLACED)
        go_on(killed, steps)
        resumed.load_state_dict(killed.state_dict())
        assert resumed.engine.plan == killed.engine.plan
        go_on(resumed)
        same(resumed, expected)
    complete = texts()
    complete.engine.plan = expected.engine.plan
    go_on(complete)
    same(complete, expected)


def _extended_on_two(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor, bool]:
    expected, killed = texts(ranks=Ranks()), texts(ranks=Ranks())
    go_on(expected)
    go_on(killed, 2)
    killed.save(f"{folder}/private.pt")
    torch.distributed.barrier()
    resumed = texts(ranks=Ranks(), noise_source=REPLACED)
    resumed.load(f"{folder}/private.pt")
    go_on(resumed)
    return weights(expected.model), weights(resumed.model), killed.engine.plan == resumed.engine.plan


def test_replicas_with_extended_plans_resume_from_the_state_of_the_first(tmp_path):
    found = run_ranks(_extended_on_two, 2, str(tmp_path))
    assert all(torch.equal(expected, resumed) for expected, resumed, _ in found)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_a_training_with_numpy_numbers_resumes_from_a_file_to_the_same_bits(number, tmp_path):
    def begin():
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=number(0.3), momentum=number(0.9))
        sizes = {"steps": np.int64(4), "batch_size": np.int32(BATCH), "microbatch": np.int64(7)}
        budget = {"noise_multiplier": number(1.1), "delta": number(1e-3), "threshold": number(0.7), "accountant": "rdp"}
        own = {"num_workers": np.int8(0), "noise_source": NoiseSource.from_seed(SEED)}
        private = make_private(model, optimizer, DATA, cross_entropy, **sizes, **own, **budget)
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


def test_a_training_is_saved_to_a_file_and_loaded(tmp_path):
    expected, killed, resumed = start(Points()), start(Points()), start(Points(), noise_source=REPLACED)
    go_on(expected)
    go_on(killed, 2)
    killed.save(tmp_path / "private.pt")
    assert (tmp_path / "private.pt").stat().st_mode & 0o077 == 0, "it contains the noise key"
    resumed.load(str(tmp_path / "private.pt"))
    go_on(resumed)
    same(resumed, expected)


def test_a_state_of_other_groups_is_refused():
    def begin(first: str) -> Private:
        task = Points()
        groups = by_mapping(task.model, {first: "one", "*": "rest"})
        return start(task, clip=groups)

    names = [group.layers[0] for group in per_layer(Points().model)]
    state = begin(names[0]).state_dict()
    begin(names[0]).load_state_dict(state)
    with pytest.raises(UserError, match=r"The state was made with groups=\[\['one', "):
        begin(names[-1]).load_state_dict(state)
    with pytest.raises(UserError, match="groups="):  # the same groups in another order
        first, second = per_layer(Points().model)[:2], per_layer(Points().model)[2:]
        start(Points(), clip=(*second, *first)).load_state_dict(start(Points(), clip=(*first, *second)).state_dict())


def test_a_step_out_of_memory_restarts_with_half_the_microbatch_and_resumes():
    def begin(**options: Any) -> tuple[Private, list[int]]:
        task, seen = Points(), []

        def losses(model: nn.Module, batch: Any) -> Tensor:
            seen.append(len(batch[0]))
            if len(batch[0]) > 5 and full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return task.losses(model, batch)

        return start(task, losses=losses, **options), seen

    full = False
    (killed, seen), (expected, _), (resumed, _) = begin(), begin(), begin(noise_source=REPLACED)
    for private in (killed, expected):
        go_on(private, 1)
    full = True
    seen.clear()
    go_on(killed, 1)
    assert seen[0] == MICROBATCH and set(seen[1:-1]) == {MICROBATCH // 2} and killed.state_dict()["microbatches"] == [3]
    go_on(expected)
    resumed.load_state_dict(killed.state_dict())
    go_on(resumed)
    same(resumed, expected)


def test_the_check_takes_fewer_examples_when_memory_runs_out(capsys):
    task = Points()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return task.losses(model, batch)

    go_on(start(task, losses=losses), 1)
    assert "checking with 3 examples at once" in capsys.readouterr().err
