"""Clipped sums of a text task in float64, with padding, against those of single examples."""

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.reference import clipped_sums
from tests.clipping.traced import clip

MODES = {"flat": (flat, "bookkeeping"), "layer": (per_layer, "bookkeeping"), "ghost": (flat, "ghost")}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def check_sums(task, examples, mode):
    """At thresholds that clip half of the examples."""
    assert len(set(task._lengths[examples])) > 2, "padding must be there"
    make_partition, norms = MODES[mode]
    partition = make_partition(task.model)
    loss_of = lambda i: task.losses_of([i])[0]  # noqa: E731
    thresholds = clipped_sums(task.model, loss_of, examples, partition, [1.0] * len(partition)).norms.median(1).values
    truth = clipped_sums(task.model, loss_of, examples, partition, thresholds)
    task.model.zero_grad()
    with attach(task.model, partition, thresholds, norms=norms) as engine:
        clip(engine, task.losses_of, examples)
    for parameter, sums in gradients(task.model).items():
        assert float((sums - truth.sums[parameter]).norm()) <= 1e-9 * float(truth.sums[parameter].norm()) + 1e-13
