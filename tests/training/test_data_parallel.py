"""Replicas and shards take the steps of one process, and noise is added once for any number of processes."""

import math
from pathlib import Path

import pytest
import torch

from groupwise.config.schema import OptimConfig
from groupwise.privacy import NoiseSource
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.tiny_training import ADAPTIVE_LAYER, FIXED_LAYER, FLAT, GHOST, NONE
from tests.training.data_parallel import PointsTask, build, parameters, steps

ADAM = OptimConfig(name="adam", learning_rate=0.01)
CASES = {
    "ddp flat": (FLAT, "ddp", 0.0),
    "ddp ghost": (GHOST, "ddp", 0.0),
    "ddp adaptive_layer": (ADAPTIVE_LAYER, "ddp", 0.0),
    "ddp none": (NONE, "ddp", 0.0),
    "ddp flat, with noise": (FLAT, "ddp", 1.0),
    "ddp adaptive_layer, with noise": (ADAPTIVE_LAYER, "ddp", 1.0),
    "fsdp ghost": (GHOST, "fsdp", 0.0),
    "fsdp adaptive_layer": (ADAPTIVE_LAYER, "fsdp", 0.0),
    "fsdp none": (NONE, "fsdp", 0.0),
}


def outcome(case, ranks):
    clip, kind, sigma = CASES[case]
    trainer = build(clip, ranks, kind, sigma)
    reports = steps(trainer)
    return parameters(trainer), trainer.named_thresholds(), reports


def _noises(ranks, kind, change=lambda trainer: None):
    """How far each of 16 steps without examples moves the parameters, in units of one process's noise, (16, P)."""
    trainer = build(FIXED_LAYER, ranks, kind, sigma=1.0, batches=[[]] * 16, allocation="weighted")
    change(trainer)
    positions = [parameters(trainer)]
    for step in range(16):
        trainer.step(step)
        positions.append(parameters(trainer))
    groups = trainer.private.engine.groups
    units = {}
    for group in groups:  # std_k = σ·S·C_k/√d_k with S = √(Σ d_j); moved by 0.5/8 of it
        size = sum(p.numel() for p in group.parameters)
        everything = sum(p.numel() for other in groups for p in other.parameters)
        units[group.name] = 0.5 / 8 * math.sqrt(everything) * (0.5 / math.sqrt(len(groups))) / math.sqrt(size)
    unit = [torch.full((p.numel(),), units[n.rpartition(".")[0]]) for n, p in trainer.task.model.named_parameters()]
    return torch.stack(positions).diff(dim=0) / torch.cat(unit)


def _add_noise_on_every_rank(trainer):
    release = trainer.private._release
    trainer.private.gradient_noise = NoiseSource.from_seed(100 + trainer.private.ranks.replica)

    def release_and_sum(step):
        found = release(step)
        trainer.private.ranks.sum_([parameter.grad for parameter in trainer.private.trainable])
        return found

    trainer.private._release = release_and_sum


def _share_one_stream(trainer):
    trainer.private.gradient_noise = trainer.private.noise


def _on_two(rank, world, folder):
    ranks = Ranks()
    return {
        "outcomes": {case: outcome(case, ranks) for case in CASES},
        "noises": {kind: _noises(ranks, kind) for kind in ("ddp", "fsdp")},
        "planted": _noises(ranks, "ddp", _add_noise_on_every_rank),
        "one stream": _noises(ranks, "fsdp", _share_one_stream),
        "resumed": {case: _resumed(ranks, case, Path(folder)) for case in RESUMED},
    }


def _on_four(rank, world):
    ranks = Ranks()
    return {kind: (_noises(ranks, kind), outcome(f"{kind} adaptive_layer", ranks)) for kind in ("ddp", "fsdp")}


def _resumed(ranks, case, folder):
    """Parameters after all steps in one session, after resuming from the second step, and in the written file."""
    clip, kind, make_task = RESUMED[case]
    expected, first, second = (build(clip, ranks, kind, 1.0, ADAM, task=make_task()) for _ in range(3))
    steps(expected)
    first.step(0)
    first.step(1)
    first.save(folder / case, {})
    ranks.barrier()  # the checkpoint is written
    second.load_state_dict(load_checkpoint(folder / case))
    steps(second, 2)
    second.save_model(folder / f"{case}.pt")
    ranks.barrier()
    plain = make_task().model
    plain.load_state_dict(load_checkpoint(folder / f"{case}.pt"))
    return parameters(expected), parameters(second), torch.cat([v.flatten() for v in plain.state_dict().values()])


class TiedTask(PointsTask):
    """Two layers share one parameter."""

    def __init__(self):
        super().__init__()
        self.model.blocks[1].fall.weight = self.model.blocks[0].fall.weight


RESUMED = {
    "ddp": (ADAPTIVE_LAYER, "ddp", PointsTask),
    "fsdp": (ADAPTIVE_LAYER, "fsdp", PointsTask),
    "fsdp tied": (NONE, "fsdp", TiedTask),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(_on_two, 2, str(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four():
    return run_ranks(_on_four, 4)


@pytest.fixture(scope="module")
def one_noise():
    return _noises(Ranks(), "ddp")


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
    assert found[1] == pytest.approx(expected[1], rel=1e-12)
    for there, here in zip(found[2], expected[2], strict=True):
        assert there == pytest.approx(here, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_match_one(two, case):
    for process in two:
        same(process["outcomes"][case], outcome(case, Ranks()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_processes_match_one_though_some_shards_are_empty(four, kind):
    for process in four:
        same(process[kind][1], outcome(f"{kind} adaptive_layer", Ranks()))


@pytest.mark.parametrize("case", CASES)
def test_replicas_are_equal_bit_for_bit(two, case):
    first, second = (process["outcomes"][case] for process in two)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


def chi_square(noise):
    """How many standard deviations the sum of squares of n standard normals is from n."""
    return float(noise.square().sum() - noise.numel()) / math.sqrt(2 * noise.numel())


def test_the_noise_is_that_of_one_process_for_any_number_of_processes(one_noise, two, four):
    noises = [one_noise, *two[0]["noises"].values(), *(noise for noise, _ in four[0].values())]
    for noise in noises:
        assert abs(chi_square(noise)) < 5 and abs(float(noise.sum())) < 5 * math.sqrt(noise.numel())
    for ddp in (two[0]["noises"]["ddp"], four[0]["ddp"][0]):
        torch.testing.assert_close(ddp, one_noise, rtol=0, atol=1e-9)  # all replicas draw the same noise


def test_noise_on_every_rank_is_caught(two):
    planted = two[0]["planted"]
    assert chi_square(planted) > 50
    assert float(planted.square().mean()) == pytest.approx(2, rel=0.1)


def halves(noise):
    """Correlation of the noise that two processes add to their halves of a weight, in standard deviations."""
    start = 5 * 8 + 8 + 8 + 8  # after the stem and the first norm: (12, 8)
    a, b = noise[:, start : start + 48].flatten(), noise[:, start + 48 : start + 96].flatten()
    return float((a * b).sum()) / math.sqrt(a.numel())


def test_shards_get_independent_noise(two):
    assert abs(halves(two[0]["noises"]["fsdp"])) < 5
    assert halves(two[0]["one stream"]) > 20


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_bit_for_bit_and_written_weights_fit_the_plain_model(two, case):
    for process in two:
        expected, resumed, written = process["resumed"][case]
        assert torch.equal(expected, resumed) and torch.equal(expected, written)
