"""A recorded microbatch that is replayed on other examples matches the eager microbatch bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import import_utils

from groupwise.build import build_trainer
from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import make, make_private
from groupwise.run import plan_run
from groupwise.tasks import make_task
from groupwise.training import microbatches
from groupwise.training.from_config import make_engine
from groupwise.training.graphs import Graphs, recorder_of
from groupwise.training.microbatches import TaskSums
from groupwise.training.ranks import Ranks
from tests.checked import only_traced
from tests.tapes import Tape
from tests.tiny_training import ADAPTIVE_FLAT, ADAPTIVE_LAYER, FLAT, GHOST, NONE
from tests.training.test_step import STEPS, make_trainer

CONF = Path(__file__).resolve().parents[2] / "conf"
CPU = torch.device("cpu")


def recorded(trainer, tape=None):
    """The same trainer, with its microbatches recorded on a tape."""
    graphs = Graphs(tape or Tape(), trainer.task.model)
    trainer.private.sums = TaskSums(trainer.task, trainer.private.sums.size, graphs)
    return trainer


def eagerly(trainer):
    """The same trainer, with eager microbatches that get fillers as recorded ones do."""
    trainer.private.sums.rounds = True
    return trainer


def with_dropout(trainer):
    trainer.task.model[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
    return trainer


def scaled(trainer, factor):
    """The same trainer, with losses multiplied by `factor(batch)`."""
    losses = trainer.task.losses
    trainer.task.losses = lambda model, batch: losses(model, batch) * factor(batch)
    return trainer


def graphs_of(trainer):
    return trainer.private.sums.graphs


def state(trainer):
    for step in range(STEPS):
        values = trainer.step(step)
    flat = [parameter.detach().flatten() for parameter in trainer.task.model.parameters()]
    thresholds = torch.tensor(list(trainer.named_thresholds().values()))
    counted = None if trainer.private.engine is None else trainer.private.engine.examples
    return torch.cat(flat), thresholds, [*values, counted]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("clip", [NONE, FLAT, GHOST, ADAPTIVE_LAYER, ADAPTIVE_FLAT], ids=lambda clip: clip.name)
def test_a_recorded_run_has_the_bits_of_the_eager_one(clip, monkeypatch):
    monkeypatch.setattr(microbatches, "ROUNDED", 2)  # so that there are fillers
    tape = Tape()
    eager = state(eagerly(with_dropout(make_trainer(clip, microbatch=6))))
    graphs = recorded(with_dropout(make_trainer(clip, microbatch=6)), tape)
    found = state(graphs)
    assert torch.equal(found[0], eager[0]) and torch.equal(found[1], eager[1]) and found[2] == eager[2]
    assert len(graphs_of(graphs)) >= 1 and tape.launches >= 5  # of about 15 microbatches in three steps


@pytest.mark.parametrize("clip", [FLAT, GHOST, ADAPTIVE_LAYER], ids=lambda clip: clip.name)
def test_fillers_change_neither_sums_nor_counts(clip, monkeypatch):
    monkeypatch.setattr(microbatches, "ROUNDED", 1)
    usual, filled = state(make_trainer(clip, microbatch=6)), state(eagerly(make_trainer(clip, microbatch=6)))
    torch.testing.assert_close(filled[0], usual[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(filled[1], usual[1], rtol=1e-6, atol=0)
    assert filled[2][:-1] == pytest.approx(usual[2][:-1]) and filled[2][-1] > usual[2][-1], "there are fillers"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("workers", [0, 2])
def test_make_private_records_batches_of_any_structure(workers, monkeypatch):
    tape, taken = Tape(), []
    monkeypatch.setattr(make, "recorder_of", lambda device: tape)
    monkeypatch.setattr(microbatches, "ROUNDED", 4)
    rows = [{"x": torch.randn(3), "more": {"y": i % 2}} for i in range(64)]

    def losses(model, batch):
        return F.cross_entropy(model(batch.pop("x")), batch["more"]["y"], reduction="none")

    for graphs in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        private = make_private(
            model, torch.optim.SGD(model.parameters(), 0.1), rows, losses, noise_multiplier=1.0, steps=20,
            batch_size=16, noise_source=NoiseSource.from_seed(1), num_workers=workers, cuda_graph=graphs,
        )  # fmt: skip
        private.core.sums.rounds = True
        for _ in private.steps():
            pass
        taken.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*taken) and tape.launches >= 2


def smoke_trainer(task, clip, *more):
    """A trainer of a task of `run.py`, at smoke size."""
    config = compose_run(
        [f"task={task}", "scale=smoke", f"clip={clip}", "debug.noise_seed=3", "privacy.accountant=rdp", *more], CONF
    )
    built = make_task(config, CPU)
    engine = make_engine(built.model, config.clip)
    plan = plan_run(config, built.train_size, None if engine is None else len(engine.groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.build.verify", only_traced)  # the two runs are only compared with each other
        return build_trainer(config, built, engine, plan, CPU, Ranks(), None)


def evenly(trainer):
    """The same trainer, with eager microbatches that are padded as recorded ones are."""
    task = trainer.task
    task.losses_of = lambda rows: task.losses(task.model, task.read(rows, even=True))
    return eagerly(trainer)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("task", "clip", "more"),
    [
        ("cifar", "adaptive_layer", ("train.batch_size=16",)),
        ("sst2", "flat", ("model.dropout=0.1",)),
        pytest.param("e2e", "adaptive_layer", ("model.dropout=0.1",), marks=pytest.mark.slow),
    ],
)
def test_recorded_runs_of_the_papers_tasks_have_the_bits_of_eager_ones(task, clip, more, monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)  # masks then need no values
    tape, options = Tape(), ("train.microbatch=4", *more)
    eager = state(evenly(smoke_trainer(task, clip, *options)))
    graphs = recorded(smoke_trainer(task, clip, *options), tape)
    found = state(graphs)
    assert torch.equal(found[0], eager[0]) and torch.equal(found[1], eager[1]) and found[2] == eager[2]
    assert tape.launches


@pytest.mark.usefixtures("as_on_a_gpu")
def test_losses_that_wait_for_the_device_raise_torchs_error():
    trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=2))
    scaled(trainer, lambda read: 1.0 + 0.0 * float(read["x"].sum()))
    with pytest.raises(RuntimeError, match="capturing"):
        state(recorded(trainer))


OWN = np.random.default_rng(0)
CALLS = iter(range(1, 1000))
CHANGING_NUMBERS = {"generator": lambda task: float(OWN.random()), "counter": lambda task: float(next(CALLS) ** 3)}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("number", CHANGING_NUMBERS.values(), ids=CHANGING_NUMBERS)
def test_a_python_number_that_changes_with_each_call_is_refused(number):
    trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=2))
    scaled(trainer, lambda _: 1.0 + number(trainer.task))
    with pytest.raises(UserError, match="at launch 1 of a graph its losses differ"):
        state(recorded(trainer))


def change_a_tensor(task, rows):
    task.weight = torch.tensor(1.0 + int(rows[0]))


def change_a_number(task, rows):
    task.weight = 1.0 + int(rows[0])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("change", [change_a_tensor, change_a_number])
def test_values_that_change_outside_of_the_batch_are_refused_at_launch(change):
    trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=3))
    read, task = trainer.task.read, trainer.task
    task.read = lambda rows, even=False: (change(task, rows), read(rows))[1]
    scaled(trainer, lambda _: task.weight)
    with pytest.raises(UserError, match=r"at launch 1 of a graph its losses differ .* Put it into the batch"):
        state(recorded(trainer))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_batch_on_another_device_is_refused():
    trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=2))
    read = trainer.task.read
    trainer.task.read = lambda rows, even=False: read(rows) | {"more": read(rows)["x"].to("meta")}
    with pytest.raises(UserError, match=r"the batch contains a Tensor that is not on cpu"):
        state(recorded(trainer))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_batches_with_different_python_numbers_have_different_graphs():
    def run(wrap):
        trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=3))
        read = trainer.task.read
        trainer.task.read = lambda rows, even=False: read(rows) | {"weight": 1.0 + int(rows[0]) % 2}
        return state(wrap(scaled(trainer, lambda read: read["weight"])))

    tape = Tape()
    found, eager = run(lambda trainer: recorded(trainer, tape)), run(eagerly)
    assert torch.equal(found[0], eager[0]) and found[2] == eager[2] and tape.launches >= 3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("change", ["gradients", "weights", "mode"])
def test_new_gradients_new_weights_or_another_mode_replay_no_old_graph(change):
    def run(wrap):
        trainer = wrap(with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=3)))
        for step in range(STEPS):
            trainer.step(step)
            model = trainer.task.model
            if change == "gradients":
                trainer.private.optimizer.zero_grad()
            elif change == "weights":
                model[0].weight.data = model[0].weight.data.clone()
            else:
                model.train(step == 1)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(run(recorded), run(eagerly))


def test_cpus_and_settings_that_cannot_be_recorded_are_refused():
    with pytest.raises(UserError, match="needs an NVIDIA GPU, but this run is on cpu"):
        recorder_of(CPU)
    for options in (
        ["train.compile=true"],
        ["train.device=cpu"],
        ["model.rematerialize=true"],
        ["parallel.kind=fsdp", "parallel.ranks=2"],
    ):
        with pytest.raises(UserError, match=r"train\.cuda_graph=true"):
            compose_run(["task=e2e", "scale=smoke", "train.cuda_graph=true", *options], CONF)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_batch_that_is_begun_again_with_masks_has_other_graphs():
    def run(wrap):
        trainer = with_dropout(make_trainer(ADAPTIVE_LAYER, microbatch=4))
        trainer.task.x[int(trainer.private.sampler.indices(1)[9])] = float("nan")
        return state(wrap(trainer))

    tape = Tape()
    found, eager = run(lambda trainer: recorded(trainer, tape)), run(eagerly)
    assert torch.equal(found[0], eager[0]) and found[0].isfinite().all() and found[2][1:] == eager[2][1:]
    assert tape.launches


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_shape_is_recorded_after_a_warm_up_and_again_after_forget():
    trainer = recorded(with_dropout(make_trainer(NONE)))
    trainer.private.clear()

    def after(*counts):
        for count in counts:
            present = torch.ones(count, dtype=torch.bool)
            trainer.private.sums.run(trainer.private, 0, 0, range(count), present)
        return len(graphs_of(trainer))

    assert after(5) == 0  # allocates the gradients
    assert after(4, 4, 3) == 0 and after(4) == 1 and after(3) == 1 and after(3, 4) == 2
    graphs_of(trainer).forget()
    assert after(4, 4) == 0 and after(4) == 1
