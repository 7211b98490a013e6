"""Clipped sums of a text task in float64, with padding, against those of single examples."""

from groupwise.clipping import attach, flat, per_block, per_layer
from tests.clipping.alone import assert_exact, looped

MODES = {
    "flat": (flat, "bookkeeping"),
    "ghost": (flat, "ghost"),
    "layer": (per_layer, "bookkeeping"),
    "block": (per_block, "bookkeeping"),
}


def check_sums(task, examples, mode, loss_of=None):
    """At thresholds that clip half of the examples; `loss_of(task, i)` is the loss of one alone, if not the task's."""
    assert len(set(task._lengths[examples])) > 2, "padding must be there"
    make_partition, norms = MODES[mode]
    loss_of = loss_of or (lambda task, i: task.losses_of([i])[0])
    loop = looped(task.model, lambda i: loss_of(task, i), examples)
    with attach(task.model, make_partition(task.model), 1.0, norms=norms) as engine:
        assert_exact(engine, task.losses_of, examples, loop=loop)
