"""Checks that examples do not share random numbers, and that the run's secret key seeds all of them."""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from groupwise.clipping.runs import OUTSIDE, Draw, Runs
from groupwise.clipping.unchanged import host_states
from groupwise.errors import UserError


def check_draws(runs: Runs, examples: Sequence[int]) -> bool:
    """Check that every example draws its own random numbers.

    The proof compares two batches that differ in one example: all other examples must get the same masks in both.

    Args:
        examples: two of them run first, then both twice: draws that each example makes for itself double.

    Returns:
        Whether the expectation of all draws is known, and some loss is finite and not 0 there. Then an example can be
        compared alone and in a batch.

    Raises:
        UserError: naming the module.
    """
    half = (list(examples) * 2)[:2]
    runs.generators.seed(0)
    host = _Host(runs)
    with runs.drawing(observe=host.look) as some:
        runs.losses(half)
        host.look()
    if host.drawn:
        runs.losses_of(half)
    halves = host_states()
    with runs.drawing() as twice:
        runs.losses(half + half)
    for place, generator in host.drawn.items():
        if place != OUTSIDE or host_states() != halves:  # not twice as many draws for twice as many rows
            _refuse(f"Numbers from {generator} are drawn in {place} for all examples of a batch")
    for draw in some.taken:
        if draw.by_hand:
            raise UserError(
                f"torch.{draw.name.strip('_')} draws in {draw.place} from a generator that is passed to it, which the "
                "run's secret key does not seed: leave generator= out."
            )
    for draw in dict.fromkeys(_shared(some.taken, twice.taken)):
        if not _without_effect(runs, half, draw):
            what = f"torch.{draw.name.strip('_')} draws numbers of shape {' and '.join(map(str, draw.shapes))}"
            _refuse(f"{what} in {draw.place} for {len(half)} examples, and not twice as many for {2 * len(half)}")
    if host.drawn or not all(draw.has_expectation for draw in some.taken):
        return False
    return not some.taken or _have_losses_at_mean(runs, examples)


def _have_losses_at_mean(runs: Runs, examples: Sequence[int]) -> bool:
    """Whether some loss is finite and not 0 with the draws at their expectation (`torch.rand(n) < 0.15` masks none)."""
    with runs.drawing(mean=True):
        losses = runs.losses(examples).detach()
    return bool((losses.isfinite() & (losses != 0)).any())


def _refuse(what: str) -> NoReturn:
    raise UserError(
        f"{what}, but examples must not share randomness: draw one for each example, with the batch as first axis "
        "(torch.rand(len(x), ...)) and in equally many calls for any batch, set its rate to 0, or put that module into "
        "eval mode."
    )


def _shared(some: Sequence[Draw], twice: Sequence[Draw]) -> Iterator[Draw]:
    """The draws that examples share, from a forward pass and a second one in which every row occurs twice.

    A draw that belongs to one example has an axis that grows with the batch, or is made once per example. A permutation
    of the rows is a single draw for all examples.
    """
    for kind in dict.fromkeys((draw.place, draw.name) for draw in (*some, *twice)):
        ours, theirs = ([draw for draw in draws if (draw.place, draw.name) == kind] for draws in (some, twice))
        if sorted(d.shapes for d in ours * 2) == sorted(d.shapes for d in theirs):
            continue
        if len(ours) != len(theirs):
            yield (ours or theirs)[0]
            continue
        for one, two in zip(ours, theirs, strict=True):
            own = one.name != "randperm" and any(map(_doubled, one.shapes, two.shapes))
            workers = one.place == OUTSIDE and one.name == "random_" and one.shapes == ((),)  # a DataLoader seeds them
            if not (own or workers):
                yield one


def _doubled(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether one axis is twice as long and the others are equal."""
    differ = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
    return len(one) == len(two) and len(differ) == 1 and differ[0][1] == 2 * differ[0][0]


def _without_effect(runs: Runs, examples: Sequence[int], draw: Draw) -> bool:
    """Whether losses and gradients are the same for any numbers from 0 to 1, as for layer drop at rate 0."""
    if draw.name not in ("rand", "rand_like", "uniform_", "bernoulli", "bernoulli_"):
        return False
    parameters, found = [p for p in runs.model.parameters() if p.requires_grad], []
    for value in (0.0, 0.5, 1 - 2**-24):
        with runs.drawing(forced=(draw, value)):
            losses = runs.losses(examples)
            gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        sizes = [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]
        found.append((losses.detach(), torch.tensor(sizes)))
    (losses, norms), *others = found
    return all(torch.equal(losses, other) and torch.allclose(norms, more, 1e-4) for other, more in others)


class _Host:
    """Records which modules drew from Python's or numpy's generators: module -> the generator's name."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._last = runs, host_states()
        self.drawn: dict[str, str] = {}

    def look(self, *_: Any) -> None:
        now = host_states()
        for name, state in now.items():
            if self._last.get(name, state) != state:
                self.drawn.setdefault(self._runs.place(), name)
        self._last = now
