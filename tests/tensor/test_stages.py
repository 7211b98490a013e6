"""Four processes, two parts of each of two stages, equal one; their noise is one, and they go on as they were."""

import math
from pathlib import Path

import pytest
import torch

from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.ranks import Alone, Ranks
from tests.few_orders import few_orders
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import BATCHES, Case, make_trainer

CASES = {
    "layer": Case(grouping="layer", policy="adaptive"),
    "flat": Case(grouping="flat", policy="adaptive"),
    "none": Case(grouping="none"),
}
NOISED = {"layer": Case(grouping="layer", policy="adaptive", sigma=1.0), "device": Case(policy="adaptive", sigma=1.0)}
EMPTY = [[]] * 5


def _weights(trainer):
    """Under the whole model's names; {} on all but the first part."""
    names = trainer.runner.stage.names()
    return {names[name]: tensor.clone() for name, tensor in trainer.state_dict()["model"].items()}


def outcome(case, ranks):
    trainer = make_trainer(case, ranks)
    reports = [trainer.report(ranks.agree(*trainer.step(step))) for step in range(len(BATCHES))]
    return _weights(trainer), trainer.named_thresholds(), reports


def _noise(case, ranks):
    """What one step without examples adds to what this process has, and the thresholds after all."""
    trainer = make_trainer(case, ranks, EMPTY)
    before = {name: p.detach().clone() for name, p in trainer.runner.stage.named_parameters()}
    trainer.step(0)
    moved = {name: p.detach() - before[name] for name, p in trainer.runner.stage.named_parameters()}
    for step in range(1, len(EMPTY)):
        trainer.step(step)
    return moved, trainer.named_thresholds(), trainer.thresholds.clip_thresholds.tolist()


def _resumed(case, ranks, folder):
    whole, first, second = (make_trainer(case, ranks) for _ in range(3))
    for step in range(3):
        whole.step(step)
    first.step(0)
    path = folder / "checkpoint.pt"
    first.save(path, {"step": 1})
    second.load(path, load_checkpoint(path), 1)
    for step in (1, 2):
        second.step(step)
    ranks.barrier()
    return [dict(trainer.runner.stage.state_dict()) for trainer in (whole, second)]


def _on_four(rank, world, folder):
    ranks = Ranks(2, parts=2)
    folder = Path(folder)
    with few_orders(folder / f"cache-{rank}"):
        return {
            "place": (ranks.stage, ranks.part),
            "outcomes": {name: outcome(case, ranks) for name, case in CASES.items()},
            "noise": {name: _noise(case, ranks) for name, case in NOISED.items()},
            "resumed": {name: _resumed(case, ranks, folder / name) for name, case in NOISED.items()},
        }


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for name in NOISED:
        (folder / name).mkdir()
    return run_ranks(_on_four, 4, str(folder))


@pytest.mark.parametrize("name", CASES)
def test_four_processes_are_one(four, name):
    case = CASES[name]
    weights, thresholds, reports = outcome(Case(stages=1, grouping=case.grouping, policy=case.policy), Alone())
    found = {}
    for process in four:
        found |= process["outcomes"][name][0]
    assert found.keys() == weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)
    for process in four:
        _, there, told = process["outcomes"][name]
        assert sorted(there.values()) == pytest.approx(sorted(thresholds.values()), rel=1e-12)
        for found_there, expected in zip(told, reports, strict=True):
            assert found_there == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", NOISED)
def test_noise_is_independent_between_all_processes_and_counts_are_noised_once(four, name):
    by_place = {process["place"]: process["noise"][name] for process in four}
    drawn = {}
    for place, (moved, *_) in by_place.items():
        drawn[place] = torch.cat([moved[key].flatten() for key in sorted(moved) if "c_fc.weight" in key])
    places = sorted(drawn)
    own = {place: thresholds for place, (_, _, thresholds) in by_place.items()}
    assert all((own[stage, 0] == own[stage, 1]) == (name == "layer") for stage in (0, 1))
    for i, a in enumerate(places):
        for b in places[:i]:
            together = float((drawn[a] * drawn[b]).sum() / (drawn[a].norm() * drawn[b].norm()))
            assert abs(together) < 5 / math.sqrt(len(drawn[a]))
    thresholds = [thresholds for _, thresholds, _ in by_place.values()]
    assert all(each == thresholds[0] for each in thresholds)
    assert len(set(thresholds[0].values())) == len(thresholds[0]) == (4 if name == "device" else 4 * 6 + 4)


def test_per_device_noise_is_that_of_four_groups(four):
    """Its deviation is σ_new·√K·C_k, with C_k = C/√K: that of one group with the threshold C, for any K."""
    moved = [process["noise"]["device"][0] for process in four]
    noise = torch.cat([p.flatten() for each in moved for key, p in each.items() if key.endswith("c_fc.weight")])
    unit = 0.5 / 8 * 1.0 / math.sqrt(0.9)
    assert abs(float((noise / unit).square().sum() - len(noise))) < 5 * math.sqrt(2 * len(noise))


@pytest.mark.parametrize("name", NOISED)
def test_a_checkpoint_goes_on_where_it_was(four, name):
    for process in four:
        whole, resumed = process["resumed"][name]
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
