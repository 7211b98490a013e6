"""Clip batches in tests; an engine without a plan is traced first."""

from collections.abc import Callable, Sequence

from torch import Tensor

from groupwise.clipping.engine import ClippingEngine


def clip(engine: ClippingEngine, losses_of: Callable, rows: Sequence[int], traced_on: Sequence[int] = ()) -> Tensor:
    """Clip the examples with these indices and return their losses (B,).

    Args:
        engine: is traced first, unless it has a plan or there is only one example.
        losses_of: indices of examples -> their losses, (n,).
        rows: the examples.
        traced_on: the examples that the model is traced on; by default `rows`.
    """
    if not engine.plan.calls and (len(rows) > 1 or traced_on):
        engine.trace(losses_of, traced_on or rows)
    return engine.clip(losses_of, rows)


def clip_batch(engine: ClippingEngine, losses_of: Callable, *batch: Tensor) -> Tensor:
    """Clip all examples of a batch of tensors (B, ...); `losses_of` gets rows of each."""
    return clip(engine, rows_of(losses_of, *batch), range(len(batch[0])))


def trace_batch(engine: ClippingEngine, losses_of: Callable, *batch: Tensor) -> None:
    """Trace the model on a batch of tensors (B, ...); `losses_of` gets rows of each."""
    engine.trace(rows_of(losses_of, *batch), range(len(batch[0])))


def rows_of(losses_of: Callable, *batch: Tensor) -> Callable[[Sequence[int]], Tensor]:
    """`losses_of` as a function of row indices of the batch."""
    return lambda rows: losses_of(*(part[list(rows)] for part in batch))
