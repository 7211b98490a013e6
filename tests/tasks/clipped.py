"""Clipped sums of a text task in float64, with padding, against those of single examples."""

from tests.clipping.alone import assert_exact, looped
from tests.clipping.modes import FEW, attached

MODES = (*FEW, "block")


def check_sums(task, examples, mode, loss_of=None):
    """At thresholds that clip half of the examples; `loss_of(task, i)` is the loss of one alone, if not the task's."""
    assert len(set(task._lengths[examples])) > 2, "padding must be there"
    loss_of = loss_of or (lambda task, i: task.losses_of([i])[0])
    loop = looped(task.model, lambda i: loss_of(task, i), examples)
    with attached(task.model, mode) as engine:
        assert_exact(engine, task.losses_of, examples, loop=loop)
