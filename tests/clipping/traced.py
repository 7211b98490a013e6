"""Traces a model before the first batch that a test clips."""

from collections.abc import Callable, Sequence

from torch import Tensor

from groupwise.clipping.engine import ClippingEngine


def clip(engine: ClippingEngine, losses_of: Callable, rows: Sequence[int], traced_on: Sequence[int] = ()) -> Tensor:
    """Clip the examples with these numbers, and return their losses (B,).

    Args:
        engine: traced here, unless it has a plan or runs one example alone.
        losses_of: numbers of examples -> their losses, (n,).
        rows: the examples.
        traced_on: those that the model is traced on; by default `rows`.
    """
    if not engine.plan.calls and (len(rows) > 1 or traced_on):
        engine.trace(losses_of, traced_on or rows)
    return engine.clip(losses_of, rows)


def clip_batch(engine: ClippingEngine, losses_of: Callable, *batch: Tensor) -> Tensor:
    """The same for a batch of tensors, of which `losses_of` gets rows."""
    return clip(engine, rows_of(losses_of, *batch), range(len(batch[0])))


def trace_batch(engine: ClippingEngine, losses_of: Callable, *batch: Tensor) -> None:
    """Trace the model on the rows of a batch's tensors, (B, ...), of which `losses_of` gets some."""
    engine.trace(rows_of(losses_of, *batch), range(len(batch[0])))


def rows_of(losses_of: Callable, *batch: Tensor) -> Callable[[Sequence[int]], Tensor]:
    """A function of a batch's tensors as a function of numbers of its rows."""
    return lambda rows: losses_of(*(part[list(rows)] for part in batch))
