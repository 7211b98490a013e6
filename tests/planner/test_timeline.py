"""Schedules by hand: what is held at once, and the bubble."""

import pytest

from groupwise.pipeline.runner import held_at_once
from groupwise.planner.timeline import bubble_fraction, duration, order


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", range(3))
def test_an_order_holds_as_many_as_the_runner(schedule, stage):
    flying = most = 0
    for kind, _ in order(schedule, 3, stage, 7):
        flying += 1 if kind == "F" else -1
        most = max(most, flying)
    assert (most, flying) == (held_at_once(schedule, 3, stage, 7), 0)
    assert sorted(order(schedule, 3, stage, 7)) == [(kind, j) for kind in "BF" for j in range(7)]


def test_the_order_of_1f1b_by_hand():
    steps = [f"{kind}{j}" for kind, j in order("1f1b", 3, 1, 4)]
    assert steps == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 4), (4, 8), (16, 128)])
def test_even_stages_wait_for_the_fraction_that_the_formula_says(schedule, stages, microbatches):
    seconds = duration(schedule, microbatches, [1.0] * stages, [2.0] * stages, 0.0)
    assert seconds == pytest.approx(3.0 * (microbatches + stages - 1))
    assert 1 - 3.0 * microbatches / seconds == pytest.approx(bubble_fraction(stages, microbatches))


def test_the_bubble_of_gpt3_on_16_devices():
    assert bubble_fraction(16, 128) == pytest.approx(15 / 143)


def test_the_slowest_stage_and_the_messages_count():
    """Two stages, one microbatch: F0, message, F1, B1, message, B0."""
    assert duration("1f1b", 1, [1.0, 2.0], [3.0, 4.0], 0.5) == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 3)
    long = duration("1f1b", 100, [1.0, 2.0], [1.0, 2.0], 0.0)
    assert long == pytest.approx(100 * 4.0 + 2.0)  # the slow stage never waits, but before and after
