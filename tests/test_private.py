"""`make_private` in a user's loop matches the trainer of `run.py` bit for bit, and a loop over single examples."""

import gc
import math
import pickle
import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from groupwise import make_private
from groupwise.build import build_trainer
from groupwise.clipping import per_layer
from groupwise.config.schema import OptimConfig, RunConfig
from groupwise.privacy import NoiseSource, make_plan
from groupwise.private import Private
from groupwise.private.data import fingerprint
from groupwise.private.settings import MODES, resolve_clip
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks
from tests import tiny_training as points
from tests.private_use import DATA, Use, network

EXAMPLES, BATCH, STEPS, MICROBATCH, SEED = 60, 24, 4, 7, 5


class Points(points.Points):
    """A task and a dataset of random points, and a float64 network with dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        torch.manual_seed(0)
        parts = (nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 3))
        super().__init__(nn.Sequential(*parts), EXAMPLES)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def start(task: Any, adam: bool = True, **options: Any) -> Private:
    parameters = task.model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.05) if adam else torch.optim.SGD(parameters, lr=0.5)
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": STEPS, "batch_size": BATCH, "accountant": "rdp"}
    settings |= {} if "clip" in options else {"quantile_budget": 0.1}
    own = {"noise_source": NoiseSource.from_seed(SEED), "microbatch": MICROBATCH}
    given = {"data": task, "losses": task.losses, **settings, **own, **options}
    return make_private(task.model, optimizer, **given)


def go_on(private: Private, steps: int | None = None) -> int:
    """Take `steps` further steps, or all that are left; return how many were taken."""
    return len(list(private.steps(steps)))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["adaptive_layer", "ghost"])
def test_weights_match_the_trainer_of_a_run_with_the_same_key_bit_for_bit(mode):
    task, other = Points(), Points()
    budget = {"quantile_budget": 0.1} if mode == "adaptive_layer" else {}
    clip = resolve_clip(mode, 1.0, budget)
    config = RunConfig(clip=clip, optim=OptimConfig(name="adam", learning_rate=0.05))
    config.train.microbatch, config.debug.noise_seed = MICROBATCH, SEED
    engine = make_engine(task.model, clip)
    private = start(other, clip=mode, **budget)
    trainer = build_trainer(config, task, engine, private.plan, torch.device("cpu"), Ranks(), None)
    for step in range(STEPS):
        trainer.step(step)
    assert go_on(private) == STEPS
    assert torch.equal(weights(other.model), weights(task.model))
    assert torch.equal(private.core.thresholds.clip_thresholds, trainer.private.thresholds.clip_thresholds)
    assert private.executed == trainer.private.executed == STEPS


def test_a_step_without_noise_matches_a_float64_loop_over_examples():
    task, plain = Points(dropout=0.0), Points(dropout=0.0)
    with pytest.warns(UserWarning, match="noise_multiplier=0 adds no noise, so nothing is private"):
        private = start(task, adam=False, noise_multiplier=0.0)
    rows, groups = private.core.sampler.indices(0), [(0, 1), (2, 3), (4, 5)]
    parameters, threshold = list(plain.model.parameters()), 1 / math.sqrt(len(groups))
    sums, within = [torch.zeros_like(p) for p in parameters], torch.zeros(len(groups))
    for row in rows:
        gradients = torch.autograd.grad(plain.losses_of([row]).sum(), parameters)
        for k, members in enumerate(groups):
            norm = float(torch.cat([gradients[j].flatten() for j in members]).norm())
            within[k] += norm <= threshold
            for j in members:
                sums[j] += gradients[j] * min(1.0, threshold / norm)
    go_on(private, 1)
    assert 0 < float(within.sum()) < len(groups) * len(rows), "some are clipped and some are not"
    expected = torch.cat([(p - 0.5 * s / BATCH).flatten() for p, s in zip(parameters, sums, strict=True)])
    torch.testing.assert_close(weights(task.model), expected.detach(), rtol=1e-9, atol=1e-12)
    share = (within.double() - 0.5 * len(rows)) / BATCH + 0.5
    moved = threshold * torch.exp(-0.3 * (share - 0.6))
    thresholds = private.core.thresholds
    torch.testing.assert_close(thresholds.count_thresholds, moved, rtol=1e-12, atol=0)
    torch.testing.assert_close(thresholds.clip_thresholds, moved / moved.norm(), rtol=1e-12, atol=0)


def test_an_empty_batch_is_a_step_of_noise_alone():
    task = Points()
    private = start(task, adam=False, batch_size=0.001, steps=1)
    before = weights(task.model)
    step = private.step()
    assert private.executed == step.number == 1  # a learning-rate schedule goes on as after any step
    assert step.nonprivate["batch_size"] == 0 and math.isnan(step.nonprivate["loss"])
    assert list(step.nonprivate["clipped"].values()) == [0] * 3
    assert private.engine.examples == 0 and private.engine.counts.sum() == 0
    moved = weights(task.model) - before
    assert bool((moved != 0).all())
    expected = 0.5 * private.plan.gradient_noise_multiplier * math.sqrt(len(moved)) / 0.001
    assert float(moved.norm()) == pytest.approx(expected, rel=0.3)


def test_epsilon_is_that_of_the_executed_steps():
    task = Points()
    private = start(task)
    assert private.epsilon == 0
    go_on(private, 2)
    assert private.epsilon == private.plan.spent(2).epsilon < private.plan.epsilon
    assert private.statement().startswith("NOT PRIVATE") and "in 2 of 4 steps" in private.statement()
    assert "only if no result decided when to stop" in private.statement()
    go_on(private)
    assert private.epsilon == pytest.approx(private.plan.epsilon, rel=1e-6)
    assert "NOT PRIVATE" not in start(Points(), noise_source=None).statement()


class Augmented(Points):
    """Adds noise from torch's, Python's and NumPy's default generators whenever an example is read."""

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(5).double() + random.random() + float(np.random.rand())
        return self.x[row] + drawn, self.y[row]


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_worker_processes_get_the_data_but_neither_model_nor_losses(monkeypatch):
    def loader(reader: Any, **options: Any) -> DataLoader:
        pickle.dumps(reader)  # as spawned workers do
        return DataLoader(reader, **options)

    monkeypatch.setattr("groupwise.private.dataset_sums.DataLoader", loader)
    task = Augmented()
    start(task, losses=lambda model, batch: task.losses(model, batch), num_workers=1).step()


@pytest.mark.parametrize("steps", [1, STEPS])
def test_workers_end_at_once_after_the_last_step_or_with_an_abandoned_training(steps, monkeypatch):
    """They are not killed after five seconds, as those of a DataLoader's iterator in a cycle that is collected."""
    gc.collect()  # trainings of other tests
    ended = []

    def join(worker, timeout=None):
        plain(worker, timeout)
        ended.append(not worker.is_alive())

    plain = BaseProcess.join
    monkeypatch.setattr(BaseProcess, "join", join)
    private = start(Augmented(), num_workers=1)
    for _ in private.steps(steps):
        pass
    if steps < STEPS:
        del private
        gc.collect()
    assert ended == [True]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_the_key_and_the_step_alone(workers):
    def trained(seed: int, key: int, workers: int) -> tuple[list[Tensor], Tensor]:
        task, read = Augmented(), []

        def losses(model: nn.Module, batch: Any) -> Tensor:
            read.append(batch[0])
            return task.losses(model, batch)

        private = start(task, losses=losses, num_workers=workers, noise_source=NoiseSource.from_seed(key))
        read.clear()
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        before = generators()
        for _ in private.steps():
            assert generators() == before, "the user's generators are unchanged"
        return read, weights(task.model)

    (first, end), (second, other_end) = trained(1, SEED, 0), trained(2, SEED, workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(end, other_end)
    other, _ = trained(1, SEED + 1, 0)
    plain = {tuple(row.tolist()) for row in Augmented().x}
    assert not {tuple(row.tolist()) for row in other[0]} & plain and not torch.equal(other[0][:3], first[0][:3])


def test_augmentation_and_dropout_draw_different_random_numbers():
    class Drawing(Points):
        def __getitem__(self, row):
            return torch.rand(5).double(), self.y[row]

        def losses(self, model, batch):
            drawn.append((batch[0][0], torch.rand(5).double()))
            return super().losses(model, batch)

    drawn: list[tuple[Tensor, Tensor]] = []
    private = start(Drawing(), microbatch=1)
    drawn.clear()
    private.step()
    assert not any(torch.equal(read, masked) for read, masked in drawn)
    assert len({tuple(each.tolist()) for pair in drawn for each in pair}) == 2 * len(drawn)


def test_a_tensor_dataset_gives_the_same_bits_as_a_list_of_its_examples():
    def weights(data):
        torch.manual_seed(5)
        return Use(network(nn.Dropout(0.5)), data).train().weights

    rows = [DATA[row] for row in range(len(DATA))]
    assert torch.equal(weights(DATA), weights(rows))
    places = list(range(39, 3, -1))
    inner = torch.utils.data.Subset(torch.utils.data.Subset(DATA, places), range(30))
    assert torch.equal(weights(inner), weights([rows[place] for place in places[:30]]))


def test_a_step_reports_epsilon_and_metrics_that_are_not_private():
    task = Points()
    private = start(task)
    steps = list(private.steps())
    assert [step.number for step in steps] == [1, 2, 3, 4] and len(private.steps()) == 0
    assert steps[1].epsilon == private.plan.spent(2).epsilon
    for number, step in enumerate(steps):
        shown = step.nonprivate
        assert shown["batch_size"] == len(private.core.sampler.indices(number)) and shown["nonfinite"] == 0
        assert shown["loss"] > 0 and shown["clipped"].keys() == private.thresholds.keys()
        assert all(0 <= share <= 1 for share in shown["clipped"].values())
        assert shown["examples_per_second"] > 0
        assert "loss" not in repr(step), "repr shows nothing that is not private"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_steps_takes_at_most_the_steps_that_are_left(count):
    private = start(Points())
    steps = private.steps(count)
    assert len(steps) == min(count, STEPS) == len(list(steps)) == private.executed
    assert list(private.steps(0)) == [] and len(list(private.steps())) == STEPS - min(count, STEPS)


def compiled(task: Points, first: bool) -> Private:
    """A private training whose model is compiled before `make_private`, or else inside the losses."""
    model = torch.compile(task.model, backend="eager")
    if first:
        task.model = model
        return start(task)
    return start(task, losses=lambda _, batch: task.losses(model, batch))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("first", [True, False], ids=["compiled first", "compiled in the losses"])
def test_a_compiled_model_gives_the_same_update(first, dropout):
    plain, task = Points(dropout), Points(dropout)
    go_on(start(plain))
    go_on(compiled(task, first))
    torch.testing.assert_close(weights(task.model), weights(plain.model), rtol=1e-9, atol=1e-9)


def test_bfloat16_trains_on_float32_gradients():
    task = Points(dropout=0.0)
    task.model, task.x = task.model.float(), task.x.float()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")

    private = start(task, losses=losses)
    before = weights(task.model)
    assert go_on(private) == STEPS and not torch.equal(weights(task.model), before)
    assert {p.grad.dtype for p in task.model.parameters()} == {torch.float32}


def test_modes_match_the_configuration_files():
    folder = Path(__file__).resolve().parents[1] / "conf" / "clip"
    files = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    expected = {name: mode for name, mode in files.items() if mode.get("grouping") not in (None, "device")}
    assert expected.keys() == MODES.keys()
    for name, mode in expected.items():
        assert {"norms": "bookkeeping", **MODES[name], "name": name} == mode


def test_a_partition_and_a_plan_may_be_given():
    task = Points()
    partition = per_layer(task.model)
    plan = make_plan(
        dataset_size=EXAMPLES,
        expected_batch_size=BATCH,
        steps=2,
        noise_multiplier=2.0,
        num_groups=len(partition),
        delta=1e-3,
        accountant="rdp",
    )
    given = dict.fromkeys(("noise_multiplier", "delta", "steps", "batch_size"))
    settings = {"plan": plan, "clip": partition, "policy": "fixed"}
    private = start(task, **given, **settings)
    assert go_on(private) == 2 and private.plan is plan
    assert private.core.thresholds.clip_thresholds.tolist() == pytest.approx([1 / math.sqrt(3)] * 3)


def test_two_trainings_that_take_turns_do_not_affect_each_other():
    alone = [Use(seed=seed).train().weights for seed in (3, 4)]
    uses = [Use(seed=seed) for seed in (3, 4)]
    before = generators()
    for _ in zip(*(use.private.steps() for use in uses), strict=True):
        assert generators() == before
    for use, expected in zip(uses, alone, strict=True):
        assert torch.equal(use.weights, expected)


class Drawn(list):
    """Examples that get random noise from the default generators whenever they are read."""

    def __getitem__(self, row):
        return super().__getitem__(row) + torch.rand(3), random.random(), np.random.rand()


def test_the_fingerprint_of_data_leaves_the_callers_generators_unchanged():
    def drawn():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    def after(do):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        do()
        return drawn()

    data = Drawn(torch.zeros(3) for _ in range(3))
    assert after(lambda: fingerprint(data, NoiseSource.from_seed(0))) == after(lambda: None)
    assert fingerprint(data, NoiseSource.from_seed(0)) == fingerprint(data, NoiseSource.from_seed(0)) is not None
