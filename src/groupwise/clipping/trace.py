"""Finds the batch axis of every layer's input before training, by tracing a few forward passes.

The same examples run at two batch sizes: the axis that grows with the batch is the batch axis. Then some examples are
replaced: only their own rows may change. If a row or a loss of another example changes, the model mixes examples. The
result is a `ClipPlan`: the layout of each layer call, and of each tensor that is combined with a parameter outside a
layer. A step only looks up the plan and compares sizes.

If no axis of an input grows, all examples share it, and the layer's output has no batch axis either. One round of
passes finds such layers, and the next round traces what their outputs are combined with.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import FIRST, SHARED, CallSite, ClipPlan, Layout, Order
from groupwise.clipping.passes import Note
from groupwise.clipping.runs import Draw, Runs, fingerprints, moved_losses, moved_rows
from groupwise.errors import UserError

TRACED = 6
"""How many of the given examples a trace uses."""
REPLACED = (1, 3)
"""Rows of the larger batch that are replaced to find the layouts; not a middle one, which reversing keeps in place."""
ROUNDS = 12
"""How many layers with shared inputs may follow one another."""

EXPERTS = "transformers: experts_implementation='batched_mm'"
CHOSEN = (
    "the rows depend on the data (experts, graphs, texts cut to the longest; let every example have all of them, "
    f"masked or padded to a fixed number; {EXPERTS})"
)

MIXES = ": a layer or the loss mixes the examples of a batch"


class MixedExamples(UserError):
    """A row or a loss of one example depends on another example. `between` is the cause, if it is known."""

    def __init__(self, what: str, remedy: str, between: str = "") -> None:
        super().__init__(f"{what}{between}, {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class Batches:
    """The examples of the passes, by index: `fewer` has each once, `more` has two of them twice.

    Both contain all examples. So if lengths differ, every pass is padded to the same length.
    """

    more: list[int]
    fewer: list[int]

    @classmethod
    def of(cls, examples: Sequence[int]) -> "Batches":
        """From at least two examples; raises a `UserError` if there is only one."""
        some = list(dict.fromkeys(examples))
        if len(some) < 2:
            raise UserError("A single example does not show which rows are an example's own: give two or more.")
        return cls([*some, some[1], some[3 if len(some) > 3 else 0]], some)

    def halves(self) -> Iterator[list[int]]:
        """Rows of `more`, such that for any two rows some half has the first without the second.

        A row's code is its number, or the inverse of its example's first row's number. Each bit of the code gives two
        halves. None of these has an example twice. Last come both rows of each example that occurs twice.
        """
        n = len(self.fewer)
        codes = [*range(n), *(~self.fewer.index(example) for example in self.more[n:])]
        for bit in range((n - 1).bit_length() + 1):
            for value in (0, 1):
                yield [row for row, code in enumerate(codes) if code >> bit & 1 == value]
        for twice in self.more[n:]:
            yield [row for row, example in enumerate(self.more) if example == twice]


def replaced(batch: Sequence[int], rows: Collection[int]) -> list[int]:
    """The batch with the example of each of these rows replaced by another one, of the other rows if possible."""
    chosen = set(rows)
    others = [example for row, example in enumerate(batch) if row not in chosen] + list(batch)
    new = {row: next(other for other in others if other != batch[row]) for row in rows}
    return [new.get(row, example) for row, example in enumerate(batch)]


def exchanged(batch: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The batch in which each of these rows has the example of the next of them, and the last that of the first."""
    new = dict(zip(rows, [batch[row] for row in (*rows[1:], rows[0])], strict=True))
    return [new.get(row, example) for row, example in enumerate(batch)]


Call = tuple[str, int]
"""The label of a layer or parameter, and the number of its call in a forward pass."""


@dataclass(frozen=True)
class Seen:
    """A call's input in one forward pass: its shape, its batch axis, and a fingerprint of each row."""

    shape: tuple[int, ...]
    axis: int | None
    rows: Tensor


class Tracer:
    """Records the calls of one pass of a trace.

    Args:
        plan: the layouts that earlier rounds found, by which the calls of this pass run.
        fewer: the inputs' shapes in the pass on the smaller batch; None in that pass itself.
    """

    def __init__(self, plan: ClipPlan, batches: Batches, fewer: Mapping[Call, tuple[int, ...]] | None = None) -> None:
        self._plan, self._batches, self._fewer = plan, batches, fewer
        self.shapes: dict[Call, tuple[int, ...]] = {}
        self.seen: dict[Call, Seen] = {}
        self.losses = torch.empty(0)
        self.draws: list[Draw] = []
        self.meets = False
        """Whether a parameter was combined with a tensor outside a layer: then another round may find more of these."""

    def note(self, label: str, nth: int, x: Tensor, meets: bool) -> Layout:
        """Record the input x of a layer's or parameter's `nth` call; returns the plan's layout, or a default.
        Raises a `UserError` if the input's shape does not scale with the batch size."""
        self.meets |= meets
        shape = self.shapes[label, nth] = tuple(x.shape)
        if self._fewer is not None:
            axis = self._axis(label, shape, self._fewer.get((label, nth), shape))
            self.seen[label, nth] = Seen(shape, axis, fingerprints(x, axis))
        known = self._plan.calls.get(label, ())
        if nth >= len(known):
            return FIRST
        return SHARED if known[nth].shared else known[nth].layouts[0]

    def _axis(self, label: str, more: tuple[int, ...], fewer: tuple[int, ...]) -> int | None:
        """The axis that grows with the batch; None if no axis does."""
        many, few = len(self._batches.more), len(self._batches.fewer)
        if len(more) != len(fewer):
            _refuse(label, more, f"gets {len(fewer)} axes for {few} examples")
        growing = [axis for axis, (n, m) in enumerate(zip(more, fewer, strict=True)) if n != m]
        if any(more[axis] * few != fewer[axis] * many for axis in growing):
            _refuse(label, more, f"gets shape {fewer} for {few} examples: {CHOSEN}")
        if len(growing) > 1:
            _refuse(label, more, "has two axes that grow with the batch: examples are combined in pairs")
        return growing[0] if growing else None


Run = Callable[[list[int], Note], tuple[Tensor, list[Draw]]]
"""Computes the losses (n,) of some examples, always with the same random numbers, and records the calls and draws."""


def trace(run: Run, runs: Runs, examples: Sequence[int]) -> ClipPlan:
    """The plan of a model, from four forward passes, and four more each time that layers with shared inputs are found.
    Then two passes for each bit of a row's number replace about half of the rows each.

    Raises a `UserError` that names a layer or parameter that mixes, reorders or selects examples. To find the module in
    which they are first mixed, `runs` runs the model alone.
    """
    batches = Batches.of(examples)
    try:
        return _trace(run, batches)
    except MixedExamples as error:
        raise _explained(error, runs, batches) from error


def _trace(run: Run, batches: Batches) -> ClipPlan:
    known = ClipPlan()
    for _ in range(ROUNDS):
        fewer = _pass(run, known, batches, None, batches.fewer)
        more = _pass(run, known, batches, fewer.shapes, batches.more)
        others = {row: _pass(run, known, batches, fewer.shapes, replaced(batches.more, [row])) for row in REPLACED}
        found = _plan(fewer, more, others, len(batches.more))
        for row, other in others.items():
            _check_losses_keep(batches.more, (row,), more, other)
        shared = any(site.shared for sites in found.calls.values() for site in sites)
        if found == known or not (more.meets or shared):
            _check_rows(partial(_pass, run, found, batches, fewer.shapes), found, batches, more)
            return found
        known = found
    raise UserError(f"More than {ROUNDS} layers in a row have inputs that all examples share: freeze some of them.")


def _pass(
    run: Run, plan: ClipPlan, batches: Batches, fewer: Mapping[Call, tuple[int, ...]] | None, batch: list[int]
) -> Tracer:
    """Run a batch; `fewer` has the same meaning as in `Tracer`."""
    tracer = Tracer(plan, batches, fewer)
    tracer.losses, tracer.draws = run(batch, tracer.note)
    return tracer


def _check_rows(on: Callable[[list[int]], Tracer], plan: ClipPlan, batches: Batches, more: Tracer) -> None:
    """Replace the examples of each of `Batches.halves`, to find what depends on any row, or on the largest alone.

    Where that changes a shape, also of a dropout mask (it removes the longest text), these rows exchange their examples
    instead.
    """
    for rows in batches.halves():
        other = None
        with suppress(MixedExamples):  # a shape that does not scale with the batch size
            other = on(replaced(batches.more, rows))
        if other is None or (other.shapes, other.draws) != (more.shapes, more.draws):
            other = on(exchanged(batches.more, rows))
        _check_kept(plan, batches.more, rows, more, other)


def _check_losses_keep(batch: Sequence[int], rows: Collection[int], base: Tracer, other: Tracer) -> None:
    """Raise `MixedExamples` if a loss changed although only the examples of other rows were replaced."""
    for row in moved_losses(base.losses, other.losses, 1e-3):
        if row not in rows:
            raise MixedExamples(
                f"Example {batch[row]} has loss {float(base.losses[row]):.6g} in one batch and "
                f"{float(other.losses[row]):.6g} in another",
                "so no example's influence is bounded: compute each loss from its own example alone.",
                MIXES,
            )


def _check_kept(plan: ClipPlan, batch: Sequence[int], rows: Sequence[int], base: Tracer, other: Tracer) -> None:
    """Raise `MixedExamples` if `other`, in which the examples of these rows were replaced, differs in other rows."""
    _check_losses_keep(batch, rows, base, other)
    for (label, nth), seen in base.seen.items():
        site, there = plan.calls[label][nth], other.seen.get((label, nth))
        if there is None or there.shape != seen.shape:
            _refuse(label, seen.shape, f"gets another number of rows when examples are replaced: {CHOSEN}")
        own: set[int] = set()
        for row in rows if not site.shared else ():
            own.update(site.layouts[0].rows_of(len(seen.rows), slice(row, row + 1)).tolist())
        if moved := sorted(set(moved_rows(seen.rows, there.rows)) - own):
            _refuse(label, seen.shape, f"has rows {moved[:6]} that depend on other examples (mixed or reordered)")


def _plan(fewer: Tracer, more: Tracer, others: Mapping[int, Tracer], examples: int) -> ClipPlan:
    """The plan, from the recorded passes; `others` by the row of the replaced example."""
    for tracer in (fewer, *others.values()):
        for label, _ in sorted(tracer.shapes.keys() ^ more.shapes.keys()):
            what = "is used more often in some batches than in others (call it once per batch, not once per example)"
            _refuse(label, more.shapes.get((label, 0), ()), what)
    found: dict[Call, CallSite | None] = {}
    for (label, nth), seen in more.seen.items():
        moved: dict[int, set[int]] = {}
        for row, other in others.items():
            there = other.seen[label, nth]
            if there.shape != seen.shape:
                _refuse(label, seen.shape, f"gets another number of rows when one example is replaced: {CHOSEN}")
            moved[row] = set(moved_rows(seen.rows, there.rows))
        found[label, nth] = _site(label, seen, moved, examples)
    layouts = {layout for site in found.values() if site for layout in site.layouts}
    calls: dict[str, list[CallSite]] = {}
    for (label, nth), site in found.items():
        site = site or _like_others(label, more.seen[label, nth], examples, layouts)
        calls.setdefault(label, []).append(site)
    return ClipPlan({label: tuple(of) for label, of in calls.items()})


def _site(label: str, seen: Seen, moved: Mapping[int, set[int]], examples: int) -> CallSite | None:
    """The layout that follows from the rows that changed with each replaced example; None if their order is unclear."""
    if seen.axis is None:
        if any(moved.values()):
            _refuse(label, seen.shape, "has no batch axis but depends on the examples")
        return CallSite(shared=frozenset({seen.shape}))
    each = len(seen.rows) // examples
    grouped, tiled = (
        all(rows <= set(layout.rows_of(len(seen.rows), slice(row, row + 1)).tolist()) for row, rows in moved.items())
        for layout in (Layout(rows_per_example=each, order=order) for order in (Order.GROUPED, Order.TILED))
    )
    if not (grouped or tiled):
        row, rows = next((row, rows) for row, rows in moved.items() if rows)
        what = f"has rows {sorted(rows)[:6]} that depend on example {row} of {examples}"
        sorted_by_expert = f" (experts sort them; {EXPERTS})" if "expert" in label else ""
        _refuse(label, seen.shape, f"{what} (mixed or reordered){sorted_by_expert}")
    if each > 1 and not any(moved.values()):  # the same for all examples: equal rows show the order
        tiled = not moved_rows(seen.rows[:examples], seen.rows[:1].expand(examples, 2))
        grouped = not moved_rows(seen.rows[:each], seen.rows[each : 2 * each])
        if grouped == tiled:
            return None
    elif each > 1 and grouped and tiled:
        _refuse(label, seen.shape, f"has {each} rows for each example, too few of which depend on it to tell the order")
    return CallSite((Layout(seen.axis, each, Order.GROUPED if grouped or each == 1 else Order.TILED),))


def _like_others(label: str, seen: Seen, examples: int, layouts: set[Layout]) -> CallSite:
    """The layout of an input that depends on no example: that of other inputs with as many rows per example."""
    assert seen.axis is not None
    each = seen.shape[seen.axis] // examples
    orders = {layout.order for layout in layouts if layout.rows_per_example == each}
    if len(orders) != 1:
        _refuse(label, seen.shape, f"has {each} rows for each example that do not depend on it")
    return CallSite((Layout(seen.axis, each, orders.pop()),))


def _refuse(label: str, shape: tuple[int, ...], what: str) -> NoReturn:
    """Raise `MixedExamples` for a call of a layer or parameter whose input has this shape."""
    raise MixedExamples(
        f"{label} (input {shape}) {what}",
        "so it is unknown which rows are an example's own, and no example's influence is bounded: compute each "
        "example's loss from that example alone, in the order of the batch, or freeze the layer.",
    )


def _explained(error: MixedExamples, runs: Runs, batches: Batches) -> UserError:
    """Add to the trace's error the module in which examples are first mixed, if passes of the model alone show one."""
    more = batches.more
    if place := runs.first_difference(more, more, range(len(more))):
        return UserError(
            f"The model gives other losses when it runs again on the same examples and random numbers{place}: it must "
            "not change state in a forward pass, or draw random numbers from a generator that cannot be seeded."
        )
    for row in range(len(more)):
        if place := runs.first_difference(more, replaced(more, [row]), [i for i in range(len(more)) if i != row]):
            return UserError(f"{error.what}{MIXES}{place}, {error.remedy}")
    return UserError(str(error))
