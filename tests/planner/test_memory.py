"""The peak memory of a stage and the duration of a step match a computation by hand from one microbatch."""

import pytest

from groupwise.planner.estimate import bubble_fraction, duration, stage_memory
from groupwise.planner.footprint import Footprint

PLAIN = Footprint(
    frozen=1000,
    trained=10,
    received=5,
    sent=5,
    stored=50,
    forward=70,
    backward=30,
    forward_operations=1,
    backward_operations=2,
)
CLIPPED = Footprint(**vars(PLAIN) | {"backward": 37})


def of(stages=4, stage=1, microbatches=8, plain=PLAIN, clipped=CLIPPED):
    return stage_memory(plain, clipped, stages, stage, microbatches)


def test_1f1b_holds_as_many_microbatches_as_there_are_stages_to_come():
    memory = of()
    assert (memory.weights, memory.state, memory.activations) == (1000, 4 * 10, 3 * 50)
    assert (memory.working, memory.clipping) == (30, 7)
    assert memory.buffers == 3 * (5 + 5) + 5  # of activations and gradients, and one gradient being sent
    assert memory.peak == 1000 + 40 + 150 + 37 + 35


def test_the_peak_may_be_in_a_forward_pass():
    tall = Footprint(**vars(CLIPPED) | {"forward": 200})
    memory = of(plain=tall, clipped=tall)
    assert (memory.activations, memory.working) == (2 * 50, 200)


def test_the_peak_may_be_in_the_update():
    large = Footprint(**vars(CLIPPED) | {"trained": 10_000})
    assert of(plain=large, clipped=large).peak == 1000 + 4 * 10_000 + 10_000


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 4), (16, 128)])
def test_even_stages_have_the_bubble_fraction_of_the_formula(stages, microbatches):
    seconds = duration(microbatches, [1.0] * stages, [2.0] * stages, 0.0)
    assert seconds == pytest.approx(3.0 * (microbatches + stages - 1))
    assert 1 - 3.0 * microbatches / seconds == pytest.approx(bubble_fraction(stages, microbatches))


def test_the_slowest_stage_and_the_messages_count():
    """Two stages, one microbatch: F0, message, F1, B1, message, B0."""
    assert duration(1, [1.0, 2.0], [3.0, 4.0], 0.5) == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 3)
    long = duration(100, [1.0, 2.0], [1.0, 2.0], 0.0)
    assert long == pytest.approx(100 * 4.0 + 2.0)  # the slow stage only waits at the beginning and at the end
