"""Proves that no example of a batch influences another: not by what is computed, nor by random numbers or buffers.

Other examples of a batch are replaced, and an example's loss and norms must stay; every example must draw random
numbers of its own; and no buffer may change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from groupwise.clipping.clip_plan import UntracedCall
from groupwise.clipping.randomness import FOLLOWING_VALUES, OUTSIDE, Draw, shared_draws
from groupwise.clipping.trace import moved_losses
from groupwise.clipping.unchanged import host_states, moved, same_values
from groupwise.clipping.verification.runs import Outcome, Runs
from groupwise.errors import UserError

NEGLIGIBLE = 1e-5
"""Of an example's whole gradient: a group's share below this is what rounding leaves of nothing (a bias in front of a
normalisation, say), and is not compared."""

Run = Callable[[bool], Outcome]
"""One batch's forward pass, or both passes; draws calmed or not."""


def check_trace(runs: Runs, batch: Sequence[int], loss_tolerance: float) -> None:
    """Trace a batch where its engine knows no plan yet.

    Raises:
        UserError: what the trace refuses, in the words of `check_apart` where the losses show it: they name the layer
            that mixes the examples, rather than the first one that is clipped after it.
    """
    if runs.engine.plan.calls or len(set(batch)) < 2:
        return
    try:
        runs.engine.trace(runs.losses, batch)
    except UserError:
        _check_turns(runs, runs.plain, batch, 1.0, loss_tolerance)
        raise


def _turns(batch: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Rows that are kept, and the batch with all others replaced: every second row, then the others."""
    for turn in (0, 1):
        kept = list(range(len(batch)))[turn::2]
        if kept:
            yield kept, [i if row in kept else _another(batch, i) for row, i in enumerate(batch)]


def check_apart(runs: Runs, batch: Sequence[int], tolerance: float, loss_tolerance: float) -> None:
    """Run a batch without and with the engine, then with every second row replaced, then with the others replaced.

    Args:
        runs: of the model.
        batch: indices of examples, the longest first where lengths differ: it pads all batches alike.
        tolerance: relative, for norms.
        loss_tolerance: relative, for losses.

    Raises:
        UserError: the model gives something else when it runs again, or an example's loss or norms follow the others'.
    """
    _check_turns(runs, runs.clipped, batch, tolerance, loss_tolerance)


def _check_turns(
    runs: Runs,
    run: Callable[[Sequence[int], bool], Outcome],
    batch: Sequence[int],
    tolerance: float,
    loss_tolerance: float,
) -> None:
    """See `check_apart`; `run` is that of `runs` that is compared."""

    @cache
    def first(calm: bool) -> Outcome:
        return run(batch, calm)

    pair = _comparable(runs, lambda calm: runs.plain(batch, calm), first)
    if pair is not None and bool(moved_losses(pair[0].losses, pair[1].losses, loss_tolerance).any()):
        raise UserError(_not_a_function(runs, batch))
    for kept, other in _turns(batch):
        pair = _comparable(runs, first, lambda calm, other=other: run(other, calm))  # type: ignore[misc]
        if pair is not None:
            _check_kept(runs, batch, other, kept, pair, tolerance, loss_tolerance)


def slack(norms: Tensor, tolerance: float) -> Tensor:
    """By how much the norms (K, n) of n examples may be off; the last is what rounding may add to a norm of 0."""
    return tolerance * norms + 1e-12 + NEGLIGIBLE * norms.nan_to_num(0, 0, 0).norm(dim=0)


def moved_norms(before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    """Which norms (K, n) differ by more than a share of themselves; two that are not finite are alike."""
    before, after = before.double(), after.double()
    return ((before - after).abs() > slack(after, tolerance)) | (before.isfinite() != after.isfinite())


def first_seen(one: Sequence[int], other: Sequence[int], kept: Sequence[int], runs: Runs, calm: bool) -> str:
    """Where the kept rows of two batches part in a forward pass, as an insertion into a sentence; or nothing."""
    taken = []
    for batch in (one, other):
        prints = Fingerprints(len(batch), kept)
        runs.plain(batch, calm, prints.take)
        taken.append(prints)
    place = taken[0].first_difference(taken[1], 1e-4)
    return "" if place is None else f" (first seen in {place})"


def _comparable(runs: Runs, one: Run, two: Run) -> tuple[Outcome, Outcome] | None:
    """Both with the same random numbers: calmed, where they may draw others, or None where that is in vain."""
    a, b = one(False), two(False)
    following = any(draw.name in FOLLOWING_VALUES for draw in a.draws)
    if not following and [draw.shapes for draw in a.draws] == [draw.shapes for draw in b.draws]:
        return a, b
    a, b = one(True), two(True)
    return None if runs.uncalmed else (a, b)


def check_many(runs: Runs, examples: Sequence[int], most: int, loss_tolerance: float) -> None:
    """Run examples among as many as a microbatch may have: what mixes many alone (the hardest eight, say) shows here.

    Raises:
        UserError: an example's loss is another among more.
    """
    if most <= len(examples):
        return
    many = list(islice(cycle(examples), most))
    if len(examples) > 1 and runs.engine.plan.calls:
        with suppress(UntracedCall):  # it will be traced when it comes
            runs.engine.confirm(runs.losses, many, [*many[:-1], _another(examples, many[-1])])
    few, more = runs.plain(examples, calm=True), runs.plain(many, calm=True)
    if runs.uncalmed:
        return
    for row in moved_losses(few.losses, more.losses[: len(examples)], loss_tolerance).nonzero().flatten().tolist():
        a, b = float(few.losses[row]), float(more.losses[row])
        place = first_seen(examples, many, range(len(examples)), runs, calm=True)
        raise UserError(
            f"Example {examples[row]} has loss {a:.6g} among {len(examples)} examples and {b:.6g} among {most}: a "
            f"layer or the loss mixes the examples of a batch{place}, so no example's influence is bounded: compute "
            "each loss from its own example alone."
        )


def _another(batch: Sequence[int], example: int) -> int:
    """The longest example, or for itself the next one that there is."""
    return next((i for i in batch if i != example), example)


def _check_kept(
    runs: Runs,
    batch: Sequence[int],
    other: Sequence[int],
    kept: Sequence[int],
    pair: tuple[Outcome, Outcome],
    tolerance: float,
    loss_tolerance: float,
) -> None:
    before, after = pair
    mixes = (
        "a layer or the loss mixes the examples of a batch{}, so no example's influence is bounded: compute each loss "
        "from its own example alone."
    )
    for row in moved_losses(before.losses, after.losses, loss_tolerance).nonzero().flatten().tolist():
        if row in kept:
            a, b = float(before.losses[row]), float(after.losses[row])
            raise UserError(
                f"Example {batch[row]} has loss {a:.6g} among some examples and {b:.6g} among others: "
                + mixes.format(first_seen(batch, other, kept, runs, calm=False))
            )
    for k, row in moved_norms(before.norms, after.norms, tolerance).nonzero().tolist():
        if row in kept:
            a, b, group = float(before.norms[k, row]), float(after.norms[k, row]), runs.engine.groups[k].name
            raise UserError(
                f"Example {batch[row]} has gradient norm {a:.6g} in group {group!r} among some examples and {b:.6g} "
                "among others: a layer mixes the examples of a batch or puts them in another order"
                f"{first_seen(batch, other, kept, runs, calm=False)}; every layer must take them as the first axis of "
                "its input, in the order of the losses."
            )


def _not_a_function(runs: Runs, batch: Sequence[int]) -> str:
    place = first_seen(batch, batch, range(len(batch)), runs, calm=False)
    if place:
        return (
            f"The model gives other losses when it runs again on the same examples and random numbers{place}: no state "
            "may change from one forward pass to the next, nor randomness come from a generator that cannot be seeded."
        )
    return "The model gives other losses with the engine than without: please report this."


REMEDY = (
    "draw one for each example, with the batch as first axis (torch.rand(len(x), ...)), set its rate to 0, or put that "
    "module into eval mode"
)


def check_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Refuse a buffer that is not what it was.

    Raises:
        UserError: naming it.
    """
    now = dict(model.named_buffers(remove_duplicate=False))
    for name, value in before.items():
        if name in now and not same_values(now[name], value):
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
    if given := next((draw for draw in some.taken if draw.by_hand), None):
        raise UserError(
            f"torch.{given.name.strip('_')} draws in {given.place} from a generator that it is given, which the run's "
            "secret key does not seed: leave generator= out."
        )
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
        with runs.drawing(forced=(draw, value)):
            losses.append(runs.losses(examples).detach())
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


class Fingerprints:
    """A few numbers for each chosen row of every tensor that enters or leaves a module, in the order of the calls."""

    def __init__(self, batch: int, rows: Sequence[int]) -> None:
        self._batch, self._rows = batch, list(rows)
        self.taken: list[tuple[str, list[Tensor]]] = []

    def take(self, place: str, values: Any) -> None:
        """Tensors whose first axis is not made of the batch are left out."""
        found = []
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] and tensor.shape[0] % self._batch == 0:
                rows = tensor.detach().reshape(self._batch, -1)[self._rows].double()
                found.append(torch.stack([rows.sum(1), rows.norm(dim=1)]).cpu())
        self.taken.append((place, found))

    def first_difference(self, other: "Fingerprints", tolerance: float) -> str | None:
        """Where the same rows of two forward passes part, in words; None where they never do, as far as is seen."""
        for (place, ours), (there, theirs) in zip(self.taken, other.taken, strict=False):
            if place != there or len(ours) != len(theirs):
                return place
            for a, b in zip(ours, theirs, strict=True):
                size = torch.maximum(a[1], b[1]).nan_to_num()
                moved = (a - b).abs() > tolerance * size + 1e-9
                if bool((moved | (a.isfinite() != b.isfinite())).any()):
                    return place
        return None
