"""Compares clipped sums of a padded text task in float64 with a loop over single examples."""

from tests.clipping.alone import assert_exact, looped
from tests.clipping.modes import FEW, attached

MODES = (*FEW, "block")


def check_sums(task, examples, mode, loss_of=None):
    """Check sums at thresholds that clip half of the examples; `loss_of(task, i)` may replace the loss of the task."""
    assert len(set(task._train.lengths[examples])) > 2, "examples of different lengths are needed"
    loss_of = loss_of or (lambda task, i: task.losses_of([i])[0])
    loop = looped(task.model, lambda i: loss_of(task, i), examples)
    with attached(task.model, mode) as engine:
        assert_exact(engine, task.losses_of, examples, loop=loop)
