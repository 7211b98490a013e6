"""Compares clipped sums of a padded text task in float64 with a loop over single examples."""

import torch
import torch.nn.functional as F

from groupwise.tasks import make_task
from tests.clipping.alone import assert_exact, looped
from tests.clipping.modes import FEW, attached

MODES = (*FEW, "block")


def in_float64(config):
    """The task in float64, with perturbed parameters: at the start of adapters half of the gradients are zero."""
    torch.manual_seed(0)
    task = make_task(config, torch.device("cpu"))
    task.model.double()
    with torch.no_grad():
        for parameter in task.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return task


def losses_by_hand(task, tokens, start):
    """The losses of the target tokens (n,) of one sequence without padding, mask or positions, from all logits."""
    tokens = torch.as_tensor(tokens).long()
    logits = task.model(tokens[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[start - 1 : -1], tokens[start:], reduction="none")


def check_sums(task, examples, mode, loss_of=None):
    """Check sums at thresholds that clip half of the examples; `loss_of(task, i)` may replace the loss of the task."""
    assert len(set(task._train.lengths[examples])) > 2, "examples of different lengths are needed"
    loss_of = loss_of or (lambda task, i: task.losses_of([i])[0])
    loop = looped(task.model, lambda i: loss_of(task, i), examples)
    with attached(task.model, mode) as engine:
        assert_exact(engine, task.losses_of, examples, loop=loop)
