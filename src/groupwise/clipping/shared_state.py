"""Refuse what the examples of a batch share in a forward pass: random numbers, and buffers that the data moves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.calls import OUTSIDE
from groupwise.clipping.draws import Draw, shared_draws
from groupwise.clipping.generators import host_states, moved
from groupwise.clipping.runs import Runs
from groupwise.errors import UserError

REMEDY = (
    "draw one for each example, with the batch as first axis (torch.rand(len(x), ...)), set its rate to 0, or put that "
    "module into eval mode"
)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copies of the buffers by name; afterwards the model's own hold the same again."""
    before = [
        (module, local, buffer, f"{name}.{local}" if name else local, buffer.clone())
        for name, module in model.named_modules()
        for local, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield {name: value for _, _, _, name, value in before}
    finally:
        with torch.no_grad():
            for module, local, buffer, _, value in before:
                module._buffers[local] = buffer
                if not _same(buffer, value):
                    buffer.copy_(value)


def check_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Refuse a buffer that is not what it was.

    Raises:
        UserError: naming it.
    """
    now = dict(model.named_buffers(remove_duplicate=False))
    for name, value in before.items():
        if name in now and not _same(now[name], value):
            raise UserError(
                f"Buffer {name!r} changes in a forward pass of training, so it carries what it saw past all clipping "
                "and noise: put its module into eval mode for good, or use one without running state."
            )


def check_draws(runs: Runs, batch: Sequence[int], buffers: dict[str, Tensor]) -> None:
    """Refuse random numbers that examples share, by the module in which they are drawn.

    The guarantee couples two batches that differ in one example: all others must meet the same masks in both.

    Args:
        runs: of the model.
        batch: two of its rows run first, then these rows twice: draws of their own double.
        buffers: those of the model as they were (see `check_buffers`).

    Raises:
        UserError: naming the module, or the buffer.
    """
    half = list(batch[:2])
    host = _Host(runs)
    with torch.no_grad():
        runs.generators.seed(0)
        with runs.drawing(border=host.look) as some:
            host.begin()
            runs.losses(half)
            host.look()
        check_buffers(runs.model, buffers)
        if host.drawn:
            runs.losses(half)
        halves = host_states()
        runs.generators.seed(0)
        with runs.drawing() as twice:
            runs.losses(half + half)
    if host.drawn and moved(halves, host_states()):  # not twice as many draws for twice as many rows
        generator, place = host.drawn
        raise UserError(
            f"A number from {generator} is drawn in {place} for all examples of a batch: examples must not share "
            f"randomness, so {REMEDY}."
        )
    if host.drawn and host.drawn[1] != OUTSIDE:
        generator, place = host.drawn
        raise UserError(
            f"Numbers from {generator} are drawn in {place}, but the run's secret key seeds torch's generators "
            f"alone: {REMEDY}."
        )
    runs.uncalmed = runs.uncalmed or host.drawn is not None
    for draw in dict.fromkeys(shared_draws(some.taken, twice.taken)):
        if _without_effect(runs, half, draw):
            continue
        raise UserError(
            f"torch.{draw.name.strip('_')} draws numbers of shape {' and '.join(map(str, draw.shapes))} in "
            f"{draw.place} for all {len(half)} examples of a batch: examples must not share randomness, so {REMEDY}."
        )


def _without_effect(runs: Runs, examples: Sequence[int], draw: Draw) -> bool:
    """Whether numbers from 0 to 1 change nothing: a layer drop at rate 0 draws them all the same."""
    if draw.name not in ("rand", "rand_like", "uniform_", "bernoulli", "bernoulli_"):
        return False
    losses = []
    for value in (0.0, 0.5, 1 - 2**-24):
        runs.generators.seed(0)
        with torch.no_grad(), runs.drawing(forced=(draw, value)):
            losses.append(runs.losses(examples))
    return all(torch.equal(losses[0], other) for other in losses[1:])


class _Host:
    """Where Python's or numpy's generator was first drawn from."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.drawn: tuple[str, str] | None = None

    def begin(self) -> None:
        self._last = host_states()

    def look(self, *_: Any) -> None:
        if self.drawn is None and (generator := moved(self._last, host_states())):
            self.drawn = generator, self._runs.calls.innermost


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
