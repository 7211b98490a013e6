"""Ways to clip flat in a pipeline, on numbers that can be added up by hand."""

from dataclasses import replace

import pytest

from groupwise.planner.timeline import Setting, flat_variants, per_device, two_passes

STAGES, COUNT = 4, 8
EVEN = Setting(
    schedule="1f1b",
    microbatches=COUNT,
    forward=(1.0,) * STAGES,
    backward=(2.0,) * STAGES,
    norms=(2.0,) * STAGES,
    update=0.0,
    message=0.0,
    agree=0.0,
    gradients=(30,) * STAGES,
    edges=(10, 20, 20, 10),
    host=1e9,
    bandwidth=1e12,
    rematerialize=True,
)
BASE = 3.0 * (COUNT + STAGES - 1)


def by_name(setting):
    return {(v.name.removeprefix("flat, "), v.sync.partition(" ")[0]): v for v in flat_variants(setting)}


def test_per_device_clipping_takes_the_schedule_its_update_and_one_agreement():
    assert per_device(EVEN).seconds == pytest.approx(BASE)
    assert per_device(replace(EVEN, update=5.0, agree=0.5)).seconds == pytest.approx(BASE + 5.5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_passes_take_two_schedules(schedule):
    assert two_passes(replace(EVEN, schedule=schedule)).seconds == pytest.approx(2 * BASE)


def test_holding_for_each_microbatch_drains_the_pipeline_backward():
    """No stage goes on before the backward pass has come to the first: COUNT times S of them in a row at least."""
    held = by_name(EVEN)["hold", "each"]
    assert held.seconds >= COUNT * STAGES * 2.0
    assert held.seconds > 1.5 * BASE


def test_with_one_stage_nobody_waits_for_another():
    alone = replace(EVEN, forward=(1.0,), backward=(2.0,), norms=(2.0,), gradients=(30,), edges=(0,))
    assert by_name(alone)["hold", "each"].seconds == pytest.approx(3.0 * COUNT)


def test_rematerialising_once_at_the_end_adds_a_backward_pass_for_each_microbatch():
    assert by_name(EVEN)["rematerialise", "once,"].seconds == pytest.approx(BASE + COUNT * 2.0)
    keeps = replace(EVEN, rematerialize=False)  # then the forward pass must be done again as well
    assert by_name(keeps)["rematerialise", "once,"].seconds == pytest.approx(BASE + COUNT * 3.0)


def test_rematerialising_for_each_microbatch_is_as_much_work_and_partly_falls_into_the_bubble():
    each = by_name(EVEN)["rematerialise", "each"].seconds
    assert max(BASE, COUNT * 5.0) < each <= BASE + COUNT * 2.0


def test_traffic_and_memory_by_hand():
    found = by_name(EVEN)
    moved = 2 * COUNT * STAGES * 30  # there and back
    assert [found["offload", sync].traffic for sync in ("each", "once,")] == [moved, moved]
    assert found["offload", "once,"].host == COUNT * 30
    assert found["offload", "each"].host == STAGES * 30
    assert found["hold", "once,"].device == (COUNT - 1) * 30
    assert found["hold", "each"].device == 0
    assert found["rematerialise", "once,"].device == COUNT * 20
    slow = replace(EVEN, host=30.0)  # two seconds a microbatch
    assert by_name(slow)["offload", "once,"].seconds > BASE + 2 * COUNT


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 9)])
def test_no_variant_waits_for_itself_and_none_is_faster_than_per_device(schedule, stages, count):
    many = {key: (getattr(EVEN, key)[0],) * stages for key in ("forward", "backward", "norms", "gradients", "edges")}
    setting = replace(EVEN, schedule=schedule, microbatches=count, **many)
    least = per_device(setting).seconds
    for variant in [*flat_variants(setting), two_passes(setting)]:
        assert variant.seconds >= least - 1e-9, variant
