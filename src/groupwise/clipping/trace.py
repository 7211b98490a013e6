"""Finds, before training, where every layer's input holds the examples: the trace of a few forward passes.

The same examples run at two batch sizes: an axis that grows with the batch holds it. Then one example is replaced, and
after it another: its rows move, and no others. A row or a loss of another example that moves shows that examples are
mixed, and by what layer. Trainable parameters are moved a little meanwhile, so that none is a gate that is shut at
first. What is found is a `ClipPlan`, the layout of each call of each layer and of each tensor that meets a parameter
outside of a layer; a step only looks it up and compares sizes.

An input that moves nowhere is shared by all examples, and what a layer makes of it has no batch axis either: such
layers are found in one round of passes, and what their outputs meet in the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import CallSite, ClipPlan
from groupwise.clipping.layouts import FIRST, SHARED, Layout, Order
from groupwise.errors import UserError

MORE, FEWER, REPLACED = 5, 3, (1, 3)
"""Examples of the two batch sizes; the rows that are replaced, none in the middle, so that reversed rows are seen."""
ROUNDS = 12
"""Layers of shared inputs that may follow each other."""


class UnevenPasses(UserError):
    """A call's shape follows other things than the size of the batch: lengths of examples that are not in all passes,
    or data that choose rows."""


Call = tuple[str, int]
"""A layer or parameter, and the number of its call in a forward pass."""


class Refuse(Protocol):
    """Raises the error of a call that cannot be clipped."""

    def __call__(self, label: str, shape: tuple[int, ...], what: str, kind: type[UserError] = UserError, /) -> NoReturn:
        """Of a layer or parameter: the shape of its input, what is wrong, and the class of the error."""


@dataclass(frozen=True)
class Seen:
    """What one forward pass showed of a call's input: its shape, the axis of the batch, a few numbers for each row."""

    shape: tuple[int, ...]
    axis: int | None = None
    rows: Tensor | None = None
    """(rows, 2) float64: a random projection and a norm."""


@dataclass(frozen=True)
class Batches:
    """Numbers of the examples of the passes: `more`, `fewer`, and `replaced`, with one other example each."""

    more: list[int]
    fewer: list[int]
    replaced: dict[int, list[int]]
    """By the row of the example that is replaced."""

    @classmethod
    def of(cls, examples: Sequence[int]) -> "Batches":
        """From two examples or more, the longest first where lengths differ: it pads all batches alike.

        Raises:
            UserError: there is one alone.
        """
        some = _different(examples)
        more = [some[i % len(some)] for i in range(MORE)]
        replaced = {}
        for row in REPLACED:
            other = some[MORE] if len(some) > MORE else next(i for i in reversed(some) if i != more[row])
            replaced[row] = [*more[:row], other, *more[row + 1 :]]
        return cls(more, more[:FEWER], replaced)

    @classmethod
    def all_of(cls, examples: Sequence[int]) -> "Batches":
        """All examples of a microbatch in each pass: the longest of them pads each, wherever it stands.

        Raises:
            UserError: there is one alone.
        """
        some = _different(examples)
        rows = [row for row in REPLACED if row < len(some)]
        more = [*some, *(some[row] for row in rows), *(some[1:] if len(some) == 2 else [])]
        return cls(more, some, {row: [*more[:row], some[0], *more[row + 1 :]] for row in rows})


def _different(examples: Sequence[int]) -> list[int]:
    some = list(dict.fromkeys(examples))
    if len(some) < 2:
        raise UserError("One example alone does not show which rows are an example's own: give two or more.")
    return some


class Recorder(Protocol):
    """Notes the inputs of calls in a forward pass."""

    def note(self, label: str, nth: int, x: Tensor, meets: bool, /) -> Layout:
        """A layer or parameter gets x in its `nth` call; returns where the batch is.

        `meets`: x meets a parameter, or what was made of one, outside of a layer.
        """


class Tracer:
    """A `Recorder` of one pass of a trace.

    Args:
        plan: where calls are looked up meanwhile, as far as it knows them.
        batches: those of the passes.
        fewer: what a pass on a smaller batch has shown; None in that pass itself, of which shapes are enough.
        refuse: makes an error of what is wrong with a call.
    """

    def __init__(self, plan: ClipPlan, batches: Batches, fewer: "dict[Call, Seen] | None", refuse: Refuse) -> None:
        self._plan, self._batches, self._fewer, self._refuse = plan, batches, fewer, refuse
        self.seen: dict[Call, Seen] = {}
        self.meets = False
        """Whether a parameter met a tensor outside of a layer: what is found of it may show more such tensors."""

    def note(self, label: str, nth: int, x: Tensor, meets: bool) -> Layout:
        """A layer or parameter gets x in its `nth` call; returns where the batch is, or a guess that changes nothing.

        Raises:
            UserError: the input's shape does not follow the size of the batch.
        """
        self.meets |= meets
        shape = tuple(x.shape)
        if self._fewer is None:
            self.seen[label, nth] = Seen(shape)
        else:
            small = self._fewer.get((label, nth))
            if small is None:
                more, fewer = len(self._batches.more), len(self._batches.fewer)
                self._refuse(label, shape, f"is used {nth + 1} times for {more} examples and less often for {fewer}")
            axis = _axis(label, shape, small.shape, self._batches, self._refuse)
            self.seen[label, nth] = Seen(shape, axis, _rows(x.detach(), axis))
        known = self._plan.calls.get(label, ())
        if nth >= len(known):
            return FIRST
        return SHARED if known[nth].shared else known[nth].layouts[0]


class Confirmer:
    """A `Recorder` of a pass in which a plan says where the calls hold the examples.

    Args:
        plan: a whole one.
        examples: B.
    """

    def __init__(self, plan: ClipPlan, examples: int) -> None:
        self._plan, self._examples = plan, examples
        self.layouts: dict[Call, Layout] = {}
        self.rows: dict[Call, Tensor] = {}

    def note(self, label: str, nth: int, x: Tensor, meets: bool) -> Layout:
        """A layer or parameter gets x in its `nth` call; returns where the batch is.

        Raises:
            UntracedCall: the plan does not know it.
        """
        layout = self.layouts[label, nth] = self._plan.find(label, nth, x, self._examples)
        self.rows[label, nth] = _rows(x.detach(), None if layout.shared else layout.axis)
        return layout


def confirm(run: "Run", plan: ClipPlan, rows: list[int], replaced: list[int], refuse: Refuse) -> None:
    """Refuse a plan that is not that of a batch, of any size, when one of its examples is replaced.

    Args:
        run: takes a pass.
        plan: what other passes have shown.
        rows: numbers of the examples of the batch.
        replaced: the same with one other example.
        refuse: makes an error of what is wrong with a call.

    Raises:
        UserError: another example's rows move; naming the layer or parameter.
        UntracedCall: the plan does not know a call.
    """
    one, two = Confirmer(plan, len(rows)), Confirmer(plan, len(rows))
    run(rows, one)
    run(replaced, two)
    at = next(row for row, (a, b) in enumerate(zip(rows, replaced, strict=True)) if a != b)
    for (label, nth), layout in one.layouts.items():
        before, after = one.rows[label, nth], two.rows.get((label, nth))
        same = after is not None and after.shape == before.shape
        moved = _moved(before, after) if same else set(range(len(before)))  # type: ignore[arg-type]
        if not moved <= _rows_of(layout, at, len(rows)):
            what = f"has rows {sorted(moved)[:6]} that follow example {at} of {len(rows)}"
            refuse(
                label, tuple(before.shape[:1]), f"{what}, and among fewer examples others: they are mixed, or reordered"
            )


def _rows_of(layout: Layout, example: int, examples: int) -> set[int]:
    """The numbers of an example's rows."""
    if layout.shared or not layout.each:
        return set()
    return set(layout.rows_of(examples * layout.each, slice(example, example + 1)).tolist())


def _rows(x: Tensor, axis: int | None) -> Tensor:
    """A random projection of each row and its norm, (rows, 2) on the CPU; the whole is one row where axis is None."""
    x = torch.view_as_real(x) if x.is_complex() else x
    rows = x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)
    rows = rows.double().nan_to_num(0.12345, 1e30, -1e30)
    numbers = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=x.device)
    direction = torch.frac(numbers.mul_(0.6180339887498949)).sub_(0.4142135623730951)
    return torch.stack([rows @ direction, torch.linalg.vector_norm(rows, dim=1)], 1).cpu()


def _moved(one: Tensor, two: Tensor) -> set[int]:
    """Rows whose numbers differ by more than rounding."""
    scale = torch.maximum(one[:, 1:], two[:, 1:])
    return set(((one - two).abs() > 1e-6 * scale).any(1).nonzero().flatten().tolist())


LEAST_LOSS = 0.1
"""A loss has the rounding of the numbers that it comes from, however small it is: smaller ones are compared as this."""


def moved_losses(before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    """Which losses (n,) differ by more than a share of themselves; two that are not finite are alike."""
    before, after = before.double().cpu(), after.double().cpu()
    apart = (before - after).abs() > tolerance * after.abs().clamp_min(LEAST_LOSS)
    return apart | (before.isfinite() != after.isfinite())


Run = Callable[[list[int], Recorder], Tensor]
"""Computes the losses (n,) of some examples, always with the same random numbers, and has calls noted."""


def trace(run: Run, batches: Batches, refuse: Refuse) -> ClipPlan:
    """The plan of a model, from four forward passes, and four more for each layer of shared inputs.

    Args:
        run: takes a pass.
        batches: of the passes.
        refuse: makes an error of what is wrong with a call.

    Raises:
        UserError: examples are mixed, put in another order, or chosen by data; naming the layer or parameter.
    """
    known = ClipPlan()
    for _ in range(ROUNDS):
        found, meets = _round(run, batches, known, refuse)
        if found == known or not (meets or any(site.shared for sites in found.calls.values() for site in sites)):
            return found
        known = found
    raise UserError("Layers of inputs that all examples share follow each other too deep to be traced: freeze them.")


def _round(run: Run, batches: Batches, known: ClipPlan, refuse: Refuse) -> tuple[ClipPlan, bool]:
    """What four forward passes show, while calls are looked up in `known`; and whether a parameter met a tensor."""
    fewer = Tracer(known, batches, None, refuse)
    run(batches.fewer, fewer)
    more = Tracer(known, batches, fewer.seen, refuse)
    before, after, others = run(batches.more, more), dict[int, Tensor](), dict[int, Tracer]()
    for row, rows in batches.replaced.items():
        others[row] = Tracer(known, batches, fewer.seen, refuse)
        after[row] = run(rows, others[row])
    try:
        found = _sites(batches, fewer, more, others, refuse)
        _check_losses_keep(batches, before, after)
    except UserError:
        again = Tracer(known, batches, fewer.seen, refuse)
        run(batches.more, again)
        _check_repeats(more, again)
        raise
    return found, more.meets


def _check_losses_keep(batches: Batches, before: Tensor, after: Mapping[int, Tensor]) -> None:
    """Refuse losses (n,) that moved with an example that is not theirs.

    Raises:
        UserError: naming an example.
    """
    for row, losses in after.items():
        for other in moved_losses(before, losses, 1e-3).nonzero().flatten().tolist():
            if other != row:
                raise UserError(
                    f"Example {batches.more[other]} has loss {float(before[other]):.6g} among some examples and "
                    f"{float(losses[other]):.6g} among others: a layer or the loss mixes the examples of a batch, so "
                    "no example's influence is bounded: compute each loss from its own example alone."
                )


def _check_repeats(one: Tracer, two: Tracer) -> None:
    """Of two passes on the same examples.

    Raises:
        UserError: a call got other numbers.
    """
    for call, seen in one.seen.items():
        same = two.seen.get(call)
        assert seen.rows is not None
        if same is None or same.rows is None or same.shape != seen.shape or _moved(seen.rows, same.rows):
            raise UserError(
                f"The model gives other numbers when it runs again on the same examples and random numbers (first seen "
                f"in what {call[0]} gets): no state may change from one forward pass to the next, nor randomness come "
                "from a generator that cannot be seeded."
            )


def _sites(batches: Batches, fewer: Tracer, more: Tracer, others: Mapping[int, Tracer], refuse: Refuse) -> ClipPlan:
    """The plan that the passes show; `others` by the row of the example that was replaced."""
    found: dict[Call, CallSite | None] = {}
    for (label, nth), seen in more.seen.items():
        moved: dict[int, set[int]] = {}
        for row, other in others.items():
            there = other.seen.get((label, nth))
            if there is None or there.shape != seen.shape:
                what = "gets another number of rows when one example is replaced: data choose them"
                refuse(label, seen.shape, what, UnevenPasses)
            assert seen.rows is not None and there.rows is not None
            moved[row] = _moved(seen.rows, there.rows)
        found[label, nth] = _site(label, seen, moved, len(batches.more), refuse)
    layouts = {layout for site in found.values() if site for layout in site.layouts}
    calls: dict[str, list[CallSite]] = {}
    for (label, nth), site in found.items():
        site = site or _like_others(label, more.seen[label, nth], len(batches.more), layouts, refuse)
        calls.setdefault(label, []).append(site)
    for label, nth in (*fewer.seen, *(call for other in others.values() for call in other.seen)):
        if (label, nth) not in more.seen:
            refuse(label, fewer.seen[label, 0].shape, "is used more often in some batches than in others")
    return ClipPlan({label: tuple(of) for label, of in calls.items()})


def _axis(label: str, more: tuple[int, ...], fewer: tuple[int, ...], batches: Batches, refuse: Refuse) -> int | None:
    """The axis that grows with the batch; None where nothing does."""
    many, few = len(batches.more), len(batches.fewer)
    if len(more) != len(fewer):
        refuse(label, more, f"gets {len(fewer)} axes for {few} examples")
    growing = [axis for axis, (n, m) in enumerate(zip(more, fewer, strict=True)) if n != m]
    if any(more[axis] * few != fewer[axis] * many for axis in growing):
        refuse(label, more, f"gets shape {fewer} for {few} examples: data choose its rows", UnevenPasses)
    if len(growing) > 1:
        refuse(label, more, "has two axes that grow with the batch: examples are put beside each other")
    return growing[0] if growing else None


def _site(label: str, seen: Seen, moved: Mapping[int, set[int]], examples: int, refuse: Refuse) -> CallSite | None:
    """From the input's rows that moved with each example that was replaced; None where they do not tell the order."""
    assert seen.rows is not None
    if seen.axis is None:
        if any(moved.values()):
            refuse(label, seen.shape, "has no axis for the batch and follows the examples")
        return CallSite(shared=frozenset({seen.shape}))
    each = len(seen.rows) // examples
    grouped, tiled = (
        all(rows <= _rows_of(Layout(seen.axis, each, order), row, examples) for row, rows in moved.items())
        for order in (Order.GROUPED, Order.TILED)
    )
    if not (grouped or tiled):
        row, rows = next((row, rows) for row, rows in moved.items() if rows)
        what = f"has rows {sorted(rows)[:6]} that follow example {row} of {examples}"
        refuse(label, seen.shape, f"{what}: examples are mixed, or put in another order")
    if each > 1 and not any(moved.values()):  # no example's data are in it; the rows that repeat are each example's
        tiled = not _moved(seen.rows[:examples], seen.rows[:1].expand(examples, 2))
        grouped = not _moved(seen.rows[:each], seen.rows[each : 2 * each])
        if grouped == tiled:
            return None
    elif each > 1 and grouped and tiled:
        refuse(label, seen.shape, f"has {each} rows for each example, too few of which follow it to tell their order")
    order = Order.GROUPED if grouped or each == 1 else Order.TILED
    return CallSite((Layout(seen.axis, each, order),))


def _like_others(label: str, seen: Seen, examples: int, layouts: set[Layout], refuse: Refuse) -> CallSite:
    """Of an input whose rows are all alike, or of no example: in the order of the others with as many of them."""
    assert seen.axis is not None
    each = seen.shape[seen.axis] // examples
    orders = {layout.order for layout in layouts if layout.each == each}
    if len(orders) != 1:
        refuse(label, seen.shape, f"has {each} rows for each example that hold nothing of it")
    return CallSite((Layout(seen.axis, each, orders.pop()),))
