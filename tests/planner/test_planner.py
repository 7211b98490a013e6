"""Plans for a tiny model: the chosen ranges and microbatch, what fits into memory, and what is refused."""

import re
from dataclasses import replace

import pytest

from groupwise.errors import UserError
from groupwise.planner.__main__ import largest_microbatch, main, make_plan
from groupwise.planner.estimate import Estimate
from groupwise.planner.footprint import Kind
from groupwise.planner.options import PlanOptions
from tests.pipeline.test_split import language_model

SETTINGS = ["devices=2", "length=32", "batch=4", "examples=40", "rank=4", "dtype=float32", "microbatch=1"]
"""The same settings as in `options`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import GPT2Config

    place = tmp_path_factory.mktemp("model")
    GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=100, n_positions=64).save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def options(folder):
    return PlanOptions(model=folder, devices=2, length=32, batch=4, examples=40, rank=4, dtype="float32")


@pytest.fixture(scope="module")
def estimate(options):
    return Estimate(options)


@pytest.fixture
def changed(options, estimate):
    """Makes an estimate with changed options that shares the footprints of `estimate`."""

    def make(**changes):
        other = Estimate(replace(options, **changes))
        other.imagined = estimate.imagined
        return other

    return make


@pytest.fixture(scope="module")
def plan(estimate):
    return make_plan(estimate)


def fullest(estimate, **changes):
    return estimate.fullest(replace(estimate.work, **changes))


def test_the_plan_adds_up(plan, options):
    assert plan.ranges == ((0, 2), (2, 4))
    assert plan.steps == 10
    assert plan.trained == 4 * 4 * (64 + 3 * 64)
    assert plan.parameters == 4 * (12 * 64 * 64 + 13 * 64) + (100 + 64) * 64 + 2 * 64 + plan.trained
    assert len(plan.memory) == 2 and all(min(vars(memory).values()) >= 0 for memory in plan.memory)
    assert plan.most == options.batch
    assert plan.plain < plan.times.per_device < plan.times.flat


def test_the_fastest_microbatch_is_chosen(estimate, plan):
    works = [replace(estimate.work, microbatch=size) for size in (1, 2, 4)]
    seconds = [estimate.times(work).per_device for work in works]
    assert plan.times.per_device == min(seconds)
    assert works[seconds.index(min(seconds))].microbatch == plan.options.microbatch


def test_the_largest_microbatch_fits_and_the_next_does_not(estimate, changed):
    need = fullest(estimate, microbatch=3) + 1e9  # what the accelerator keeps to itself
    tight = changed(memory=need / 1e9)
    assert largest_microbatch(tight) == 3
    assert fullest(estimate, microbatch=4) + 1e9 > need


@pytest.mark.parametrize(
    ("change", "message"),
    [({"devices": 5}, "5 stages cannot share 4 blocks"), ({"length": 65}, "length=65 is more than the 64 positions")],
)
def test_more_devices_or_positions_than_the_model_has_are_refused(options, change, message):
    with pytest.raises(UserError, match=message):
        make_plan(Estimate(replace(options, **change)))


def test_the_command_prints_a_plan(folder, estimate, capsys, monkeypatch):
    monkeypatch.setattr("groupwise.planner.estimate.footprint", estimate.imagined)  # of the same model and options
    assert main([f"model={folder}", *SETTINGS]) == 0
    output = capsys.readouterr().out
    assert re.search(r"bubble 20\.0%", output)  # 1/(4 + 1)
    assert "per-device clipping" in output and "flat clipping in two passes" in output
    assert "Recommended: devices=2, microbatch=1" in output.splitlines()[-1]


@pytest.mark.parametrize("kind", ["opt", "gpt_neo"])
def test_a_model_without_adapters_has_no_frozen_weights(kind, tmp_path):
    """OPT has a row for each token, and GPT-Neo only eager attention."""
    language_model(kind).config.save_pretrained(tmp_path)
    plan = make_plan(Estimate(PlanOptions(str(tmp_path), devices=2, length=8, batch=2, rank=0)))
    assert plan.memory[0].weights == 0 < plan.memory[0].state


def test_a_model_that_does_not_fit_says_what_it_needs_and_ends_with_2(folder, estimate, capsys, monkeypatch):
    monkeypatch.setattr("groupwise.planner.estimate.footprint", estimate.imagined)
    assert main([f"model={folder}", *SETTINGS, "memory=0.5"]) == 2
    output = capsys.readouterr().err
    assert re.search(r"does not fit on 2 devices .*: stage \d needs .* 0.0 GB are available; give more devices", output)
    assert output.count("\n") == 1


def test_footprints_of_more_than_three_blocks_are_extrapolated(estimate):
    kind = Kind(4, False, False)
    assert estimate.footprint(estimate.work, kind, "device") == estimate.imagined(estimate.work, kind, "device")
