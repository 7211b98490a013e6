"""`make_private` is the mechanism of `run.py` in a loop of one's own: the same bits, resumable, on replicas too."""

import copy
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from torch import Tensor, nn

from groupwise import make_private
from groupwise.build import build_trainer
from groupwise.clipping import per_layer
from groupwise.config.schema import OptimConfig, RunConfig
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, make_plan
from groupwise.private import Private
from groupwise.private.batches import print_of
from groupwise.private.make import MODES, settle_clip
from groupwise.private.seal import seal_of
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.task import Task
from tests.pipeline.ranks import run_ranks
from tests.private_use import DATA, Use, network

EXAMPLES, BATCH, STEPS, MICROBATCH, SEED = 60, 24, 4, 7, 5


class Points(Task):
    """Random points, a float64 network with dropout, and the same as a dataset."""

    train_size = EXAMPLES

    def __init__(self, dropout: float = 0.3) -> None:
        torch.manual_seed(0)
        parts = (nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 3))
        self.model = nn.Sequential(*parts).double()
        self.x, self.y = torch.randn(EXAMPLES, 5).double(), torch.randint(0, 3, (EXAMPLES,))

    def losses(self, examples):
        rows = torch.as_tensor(np.asarray(examples))
        return self.of(self.x[rows], self.y[rows])

    def of(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="none")

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]

    def evaluate(self, split, batch_size, limit=None, final=False):
        return {}

    def describe_data(self):
        return {}


def start(task: Any, adam: bool = True, **options: Any) -> Private:
    parameters = task.model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.05) if adam else torch.optim.SGD(parameters, lr=0.5)
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": STEPS, "batch_size": BATCH, "accountant": "rdp"}
    settings |= {} if "clip" in options else {"quantile_budget": 0.1}
    return make_private(
        task.model, optimizer, task, **{**settings, "noise_source": NoiseSource.from_seed(SEED), **options}
    )


def go_on(private: Private, task: Any, steps: int | None = None, microbatch: int = MICROBATCH, **options: Any) -> int:
    released = 0
    for x, y in private.batches(microbatch, steps=steps, **options):
        private.backward(task.of(x, y))
        released += private.step()
    return released


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["adaptive_layer", "ghost"])
def test_the_same_bits_as_the_trainer_of_a_run_with_the_same_key(mode):
    task, own = Points(), Points()
    budget = {"quantile_budget": 0.1} if mode == "adaptive_layer" else {}
    clip = settle_clip(mode, 1.0, budget)
    config = RunConfig(clip=clip, optim=OptimConfig(name="adam", learning_rate=0.05))
    config.train.microbatch, config.debug.noise_seed = MICROBATCH, SEED
    engine = make_engine(task.model, clip)
    private = start(own, clip=mode, **budget)
    trainer = build_trainer(config, task, engine, private.plan, torch.device("cpu"), Alone(), None)
    for step in range(STEPS):
        trainer.step(step)
    assert go_on(private, own) == STEPS
    assert torch.equal(weights(own.model), weights(task.model))
    assert torch.equal(private.mechanism.thresholds.clip_thresholds, trainer.thresholds.clip_thresholds)
    assert private.executed == trainer.mechanism.executed == STEPS


def test_without_noise_a_step_is_that_of_a_loop_over_single_examples():
    task, plain = Points(dropout=0.0), Points(dropout=0.0)
    with pytest.warns(UserWarning, match="noise_multiplier=0 adds no noise, so nothing is private"):
        private = start(task, adam=False, noise_multiplier=0.0)
    rows, groups = private.mechanism.sampler.indices(0), [(0, 1), (2, 3), (4, 5)]
    parameters, threshold = list(plain.model.parameters()), 1 / math.sqrt(len(groups))
    sums, within = [torch.zeros_like(p) for p in parameters], torch.zeros(len(groups))
    for row in rows:
        gradients = torch.autograd.grad(plain.losses([row]).sum(), parameters)
        for k, members in enumerate(groups):
            norm = float(torch.cat([gradients[j].flatten() for j in members]).norm())
            within[k] += norm <= threshold
            for j in members:
                sums[j] += gradients[j] * min(1.0, threshold / norm)
    go_on(private, task, 1)
    assert 0 < float(within.sum()) < len(groups) * len(rows), "some are clipped and some are not"
    expected = torch.cat([(p - 0.5 * s / BATCH).flatten() for p, s in zip(parameters, sums, strict=True)])
    torch.testing.assert_close(weights(task.model), expected.detach(), rtol=1e-9, atol=1e-12)
    share = (within.double() - 0.5 * len(rows)) / BATCH + 0.5
    moved = threshold * torch.exp(-0.3 * (share - 0.6))
    thresholds = private.mechanism.thresholds
    torch.testing.assert_close(thresholds.count_thresholds, moved, rtol=1e-12, atol=0)
    torch.testing.assert_close(thresholds.clip_thresholds, moved / moved.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(workers):
    whole, first, second = Points(), Points(), Points()
    private = start(whole)
    go_on(private, whole, num_workers=workers)
    killed = start(first)
    go_on(killed, first, 2, num_workers=workers)
    for x, y in killed.batches(MICROBATCH):
        killed.backward(first.of(x, y))
        break  # in the middle of the third batch
    state = copy.deepcopy(killed.state_dict())
    resumed = start(second, noise_source=NoiseSource.from_seed(99))
    resumed.load_state_dict(state)
    assert resumed.executed == 2
    assert go_on(resumed, second, num_workers=workers) == STEPS - 2
    assert torch.equal(weights(second.model), weights(whole.model))
    assert torch.equal(resumed.mechanism.thresholds.clip_thresholds, private.mechanism.thresholds.clip_thresholds)


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_numbers_of_numpy_go_through_a_file_and_on_to_the_same_bits(number, tmp_path):
    def begin():
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=number(0.3), momentum=number(0.9))
        whole = {"steps": np.int64(4), "batch_size": np.int32(BATCH), "noise_source": NoiseSource.from_seed(SEED)}
        budget = {"noise_multiplier": number(1.1), "delta": number(1e-3), "threshold": number(0.7), "accountant": "rdp"}
        private = make_private(model, optimizer, DATA, **whole, **budget)
        return model, private, torch.optim.lr_scheduler.ExponentialLR(optimizer, number(0.9))

    def train(model, private, schedule, steps=None):
        for x, y in private.batches(steps=steps):
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.step():
                schedule.step()

    model, private, schedule = begin()
    train(model, private, schedule, 2)
    file = str(tmp_path / "training.pt")
    save_checkpoint(file, {"private": private.state_dict(), "scheduler": schedule.state_dict()})
    train(model, private, schedule)
    again, resumed, other = begin()
    saved = load_checkpoint(file)
    resumed.load_state_dict(saved["private"])
    other.load_state_dict(saved["scheduler"])
    train(again, resumed, other)
    assert torch.equal(weights(model), weights(again)) and resumed.executed == 4


def test_a_state_that_was_sealed_with_numbers_of_numpy_is_taken():
    """As earlier versions sealed them; what is gone on with has Python's."""
    use, again = Use(), Use(seed=4)
    use.optimizer.param_groups[0]["lr"] = np.float64(0.5)
    state = copy.deepcopy(use.train(1).private.state_dict())
    state["optimizer"]["param_groups"][0]["lr"] = np.float64(0.5)
    old = {**state, "seal": seal_of(state)}
    assert old["seal"] != state["seal"]
    again.private.load_state_dict(old)
    assert type(again.private.state_dict()["optimizer"]["param_groups"][0]["lr"]) is float
    assert torch.equal(again.train(1).weights, use.train(1).weights)


def test_examples_share_microbatches_in_the_order_that_is_asked_for():
    task, other = Points(dropout=0.0), Points(dropout=0.0)
    go_on(start(task), task)
    private, seen = start(other), []

    def order(drawn: np.ndarray) -> np.ndarray:
        return drawn[np.argsort(-task.x[drawn, 0].numpy(), kind="stable")]

    for x, y in private.batches(MICROBATCH, order=order):
        seen.append(x[:, 0])
        private.backward(other.of(x, y))
        if private.step():
            first = torch.cat(seen)
            assert torch.equal(first, first.sort(descending=True).values) and len(first) > MICROBATCH
            seen.clear()
    torch.testing.assert_close(weights(other.model), weights(task.model), rtol=1e-9, atol=1e-12)


def test_an_empty_batch_is_a_step_of_noise_alone():
    task = Points()
    private = start(task, adam=False, batch_size=0.001, steps=1)
    before = weights(task.model)
    assert go_on(private, task) == 1 and private.executed == 1  # whoever steps a schedule with it sees no difference
    assert private.engine.examples == 0 and private.engine.counts.sum() == 0
    moved = weights(task.model) - before
    assert bool((moved != 0).all())
    expected = 0.5 * private.plan.gradient_noise_multiplier * math.sqrt(len(moved)) / 0.001
    assert float(moved.norm()) == pytest.approx(expected, rel=0.3)


def test_epsilon_is_that_of_the_steps_that_were_executed():
    task = Points()
    private = start(task)
    assert private.epsilon == 0
    go_on(private, task, 2)
    assert private.epsilon == private.plan.spent(2).epsilon < private.plan.epsilon
    assert "NOT PRIVATE" in private.statement() and "in 2 of 4 steps" in private.statement()
    go_on(private, task)
    assert private.epsilon == pytest.approx(private.plan.epsilon, rel=1e-6)
    assert "NOT PRIVATE" not in start(Points(), noise_source=None).statement()


class Augmented(Points):
    """Every reading of an example adds noise of all three default generators."""

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(5).double() + random.random() + float(np.random.rand())
        return self.x[row] + drawn, self.y[row]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_key_the_step_and_nothing_else(workers):
    seen = []
    for seed, number in ((1, 0), (2, workers)):
        task = Augmented()
        private = start(task, noise_multiplier=0.5)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        read = []
        for x, y in private.batches(MICROBATCH, num_workers=number):
            read.append(x)
            private.backward(task.of(x, y))
            assert torch.equal(torch.get_rng_state(), before[0]), "what is drawn outside is the user's"
            private.step()
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
        seen.append((read, weights(task.model)))
    (first, end), (second, other_end) = seen
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(end, other_end)
    other_key = Augmented()
    other = start(other_key, noise_source=NoiseSource.from_seed(SEED + 1))
    x, _ = next(other.batches(MICROBATCH))
    plain = {tuple(row.tolist()) for row in other_key.x}
    assert not {tuple(row.tolist()) for row in x} & plain and not torch.equal(x[:3], first[0][:3])


def test_an_augmentation_does_not_repeat_the_masks_of_the_model():
    class Drawing(Points):
        def __getitem__(self, row):
            return torch.rand(5), self.y[row]

    batches = start(Drawing()).batches(1)
    x, _ = next(batches)
    inside = torch.rand(5)
    batches.close()
    assert not torch.equal(inside, x[0]) and not torch.equal(torch.rand(5), inside)


def test_a_schedule_steps_with_the_releases():
    task = Points()
    private = start(task, adam=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(private.mechanism.optimizer, lambda step: 0.5**step)
    for x, y in private.batches(MICROBATCH):
        private.backward(task.of(x, y))
        if private.step():
            schedule.step()
    assert schedule.get_last_lr() == [0.5 * 0.5**STEPS]


@pytest.mark.parametrize("first", [True, False], ids=["compiled first", "made private first"])
def test_a_compiled_model_gives_the_same_update(first):
    plain, task = Points(dropout=0.0), Points(dropout=0.0)
    go_on(start(plain), plain)
    if first:
        task.model = torch.compile(task.model, backend="eager")
    private = start(task)
    if not first:
        task.model = torch.compile(task.model, backend="eager")
    go_on(private, task)
    torch.testing.assert_close(weights(task.model), weights(plain.model), rtol=1e-9, atol=1e-9)


def test_a_compiled_model_drops_what_the_plain_one_drops_at_every_size_of_a_batch():
    plain, task = Points(), Points()
    go_on(start(plain), plain)
    private = start(task)
    task.model = torch.compile(task.model, backend="eager")
    go_on(private, task)
    torch.testing.assert_close(weights(task.model), weights(plain.model), rtol=1e-9, atol=1e-9)


def test_bfloat16_trains_on_float32_gradients():
    task = Points(dropout=0.0)
    task.model, task.x = task.model.float(), task.x.float()
    private = start(task)
    before = weights(task.model)
    for x, y in private.batches(MICROBATCH):
        with torch.autocast("cpu", torch.bfloat16):
            losses = F.cross_entropy(task.model(x).float(), y, reduction="none")
        private.backward(losses)
        private.step()
    assert private.executed == STEPS and not torch.equal(weights(task.model), before)
    assert {p.grad.dtype for p in task.model.parameters()} == {torch.float32}


def test_modes_are_those_of_the_configuration():
    folder = Path(__file__).resolve().parents[1] / "conf" / "clip"
    files = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    alone = {name: told for name, told in files.items() if told.get("grouping") not in (None, "device")}
    assert alone.keys() == MODES.keys()
    for name, told in alone.items():
        assert {"norms": "bookkeeping", **MODES[name], "name": name} == told


def test_a_partition_and_a_ready_plan_stand_in_for_names():
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
    assert go_on(private, task) == 2 and private.plan is plan
    assert private.mechanism.thresholds.clip_thresholds.tolist() == pytest.approx([1 / math.sqrt(3)] * 3)


def test_it_imports_no_configuration_library_and_the_package_alone_no_torch():
    code = "import groupwise, sys; a = 'torch' in sys.modules; groupwise.make_private; print(a, *sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "False"
    assert not {"hydra", "omegaconf", "transformers", "torchvision", "pandas"} & set(told)


def test_two_trainings_that_take_turns_are_each_as_alone():
    alone, uses = [], []
    for seed in (3, 4):
        alone.append(Use(seed=seed).train().weights)
        uses.append(Use(seed=seed))
    before = torch.get_rng_state()
    turns = [(use, use.private.batches(MICROBATCH)) for use in uses]
    while turns:
        for use, batches in list(turns):
            batch = next(batches, None)
            if batch is None:
                turns.remove((use, batches))
                continue
            use.private.backward(use.losses(*batch))
            use.private.step()
    for use, expected in zip(uses, alone, strict=True):
        torch.testing.assert_close(use.weights, expected)
    assert torch.equal(torch.get_rng_state(), before)


def _on_two(rank, world, sigma):
    task = Points(dropout=0.0)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(rank)  # the second becomes the first
    private = start(task, ranks=Ranks(), noise_multiplier=sigma, noise_source=NoiseSource.from_seed(SEED + rank))
    go_on(private, task, order=np.random.default_rng(rank).permutation)  # each in an order of its own
    return weights(task.model), private.mechanism.thresholds.clip_thresholds, private.executed


def test_two_replicas_are_one_process():
    task = Points(dropout=0.0)
    private = start(task)
    go_on(private, task)
    for found, thresholds, executed in run_ranks(_on_two, 2, 1.0):
        torch.testing.assert_close(found, weights(task.model), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(thresholds, private.mechanism.thresholds.clip_thresholds, rtol=1e-12, atol=0)
        assert executed == STEPS


def _small_shares(rank, world):
    task = Points(dropout=0.0)
    private = start(task, adam=False, ranks=Ranks(), batch_size=2, steps=12, noise_multiplier=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(private.mechanism.optimizer, total_iters=12)
    shares = [len(private.mechanism.ranks.share(private.mechanism.sampler.indices(step))) for step in range(12)]
    for x, y in private.batches(MICROBATCH):
        private.backward(task.of(x, y))
        if private.step():
            schedule.step()
    return weights(task.model), schedule.last_epoch, shares


def test_a_process_whose_share_of_a_batch_is_empty_steps_its_schedule_with_the_others():
    (one, epochs, shares), (other, *_, others) = run_ranks(_small_shares, 2)
    assert 0 in others and any(ours and not theirs for ours, theirs in zip(shares, others, strict=True))
    assert epochs == 12
    assert torch.equal(one, other)


def _parts_of_the_data(rank, world):
    task = Points(dropout=0.0)
    task.x = task.x.roll(rank, 0)
    private = start(task, ranks=Ranks(), noise_source=None)
    try:
        go_on(private, task)
    except UserError as error:
        return str(error)


def test_processes_with_data_of_their_own_are_refused():
    for told in run_ranks(_parts_of_the_data, 2):
        assert "the whole data set in each of them" in told


class Drawn(list):
    """Examples to which something is added at random each time that they are read, by the default generators."""

    def __getitem__(self, row):
        return super().__getitem__(row) + torch.rand(3), random.random(), np.random.rand()


def test_data_are_told_apart_by_what_they_hold_or_not_at_all():
    noise, a, b = NoiseSource.from_seed(0), [(torch.ones(2), 1)] * 3, [(torch.ones(2), np.float32(1))] * 3
    assert print_of(a, noise) == print_of(a, NoiseSource.from_seed(1)) != print_of(b, noise) is not None
    unknown = [[(object(), 1)] * 3, [(np.array([object()]), 1)] * 3, [(Image.new("L", (2, 2)), 1)] * 3]
    assert [print_of(data, noise) for data in unknown] == [None] * 3


def test_data_are_looked_at_without_a_draw_from_the_callers_generators():
    def drawn():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    def after(do):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        do()
        return drawn()

    data = Drawn(torch.zeros(3) for _ in range(3))
    assert after(lambda: print_of(data, NoiseSource.from_seed(0))) == after(lambda: None)
    assert print_of(data, NoiseSource.from_seed(0)) == print_of(data, NoiseSource.from_seed(0)) is not None


def test_a_state_of_more_processes_is_refused():
    private = start(Points())
    state = private.state_dict() | {"processes": "2 processes"}
    with pytest.raises(UserError, match=r"made by 2 processes, and here are 1 process:"):
        start(Points()).load_state_dict(state)
