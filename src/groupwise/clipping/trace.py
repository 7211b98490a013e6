"""Finds, before training, where every layer's input holds the examples: the trace of a few forward passes.

The same examples run at two batch sizes: an axis that grows with the batch holds it. Then one example after the other
is replaced: its rows move, and no others. A row or a loss of another example that moves shows that examples are mixed.
What is found is a `ClipPlan`, the layout of each call of each layer and of each tensor that meets a parameter outside
of a layer; a step only looks it up and compares sizes.

An input that moves nowhere is shared by all examples, and what a layer makes of it has no batch axis either: such
layers are found in one round of passes, and what their outputs meet in the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from groupwise.clipping.clip_plan import FIRST, SHARED, CallSite, ClipPlan, Layout, Order
from groupwise.clipping.passes import Note
from groupwise.clipping.runs import Runs, fingerprints, moved_losses, moved_rows
from groupwise.errors import UserError

TRACED = 6
"""Examples that a trace takes of those that it is given."""
REPLACED = (1, 3)
"""Rows of the larger batch that show the layouts, none in the middle, so that reversed rows are seen."""
ROUNDS = 12
"""Layers of shared inputs that may follow each other."""

EXPERTS = "transformers: experts_implementation='batched_mm'"
CHOSEN = (
    f"data choose the rows (of experts or graphs, say; let every example have all of them, padded or masked; {EXPERTS})"
)

MIXES = ": a layer or the loss mixes the examples of a batch"


class MixedExamples(UserError):
    """Rows or losses follow other examples than their own.

    Args:
        what: the first half of the sentence.
        remedy: the other half.
        between: what is known of how it comes; or nothing.
    """

    def __init__(self, what: str, remedy: str, between: str = "") -> None:
        super().__init__(f"{what}{between}, {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class Batches:
    """Numbers of the examples of the passes: `more`, with two of them twice, and `fewer`.

    Where lengths differ every pass has all examples, so that the longest of them pads each, wherever it stands.
    """

    more: list[int]
    fewer: list[int]

    @property
    def swapped(self) -> list[int]:
        """`more`, with those that stand there once in the places of those that stand there twice."""
        once, twice = ([i for i, e in enumerate(self.more) if (self.more.count(e) == 1) == o] for o in (True, False))
        batch = list(self.more)
        for one, two in zip(once, twice, strict=False):
            batch[one], batch[two] = batch[two], batch[one]
        return batch

    @classmethod
    def of(cls, examples: Sequence[int]) -> "Batches":
        """From two examples or more.

        Raises:
            UserError: there is one alone.
        """
        some = list(dict.fromkeys(examples))
        if len(some) < 2:
            raise UserError("One example alone does not show which rows are an example's own: give two or more.")
        more = [*some, some[1], some[min(3, len(some) - 1)]]
        return cls(more, some)


def replaced(batch: Sequence[int], row: int) -> list[int]:
    """The batch with another of its examples in this row."""
    other = next(example for example in batch if example != batch[row])
    return [*batch[:row], other, *batch[row + 1 :]]


Call = tuple[str, int]
"""A layer or parameter, and the number of its call in a forward pass."""


@dataclass(frozen=True)
class Seen:
    """What one forward pass showed of a call's input: its shape, the axis of the batch, numbers for each row of it."""

    shape: tuple[int, ...]
    axis: int | None
    rows: Tensor


class Tracer:
    """Notes the calls of one pass of a trace.

    Args:
        plan: where calls are looked up meanwhile, as far as it knows them.
        batches: those of the passes.
        fewer: the shapes that a pass on the smaller batch has shown; None in that pass itself.
    """

    def __init__(self, plan: ClipPlan, batches: Batches, fewer: Mapping[Call, tuple[int, ...]] | None = None) -> None:
        self._plan, self._batches, self._fewer = plan, batches, fewer
        self.shapes: dict[Call, tuple[int, ...]] = {}
        self.seen: dict[Call, Seen] = {}
        self.meets = False
        """Whether a parameter met a tensor outside of a layer: what is found of it may show more such tensors."""

    def note(self, label: str, nth: int, x: Tensor, meets: bool) -> Layout:
        """A layer or parameter gets x in its `nth` call; returns where the batch is, or a guess that changes nothing.

        Raises:
            UserError: the input's shape does not follow the size of the batch.
        """
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
        """The axis that grows with the batch; None where nothing does."""
        many, few = len(self._batches.more), len(self._batches.fewer)
        if len(more) != len(fewer):
            _refuse(label, more, f"gets {len(fewer)} axes for {few} examples")
        growing = [axis for axis, (n, m) in enumerate(zip(more, fewer, strict=True)) if n != m]
        if any(more[axis] * few != fewer[axis] * many for axis in growing):
            _refuse(label, more, f"gets shape {fewer} for {few} examples: {CHOSEN}")
        if len(growing) > 1:
            _refuse(label, more, "has two axes that grow with the batch: examples are put beside each other")
        return growing[0] if growing else None


Run = Callable[[list[int], Note], Tensor]
"""Computes the losses (n,) of some examples, always with the same random numbers, and has calls noted."""


def trace(run: Run, runs: Runs, examples: Sequence[int]) -> ClipPlan:
    """The plan of a model, from four forward passes, and four more each time that layers of shared inputs are found;
    six to eight further ones replace every other row once.

    Args:
        run: takes a pass of the engine.
        runs: takes passes of the model alone, which tell where examples first meet.
        examples: two or more.

    Raises:
        UserError: examples are mixed, put in another order, or chosen by data; naming the layer or parameter.
    """
    batches = Batches.of(examples)
    try:
        return _trace(run, batches)
    except MixedExamples as error:
        raise _explained(error, runs, batches) from error


def _trace(run: Run, batches: Batches) -> ClipPlan:
    known = ClipPlan()
    for _ in range(ROUNDS):
        fewer = Tracer(known, batches)
        run(batches.fewer, fewer.note)
        more, others = Tracer(known, batches, fewer.shapes), dict[int, Tracer]()
        before, after = run(batches.more, more.note), dict[int, Tensor]()
        for row in REPLACED:
            others[row] = Tracer(known, batches, fewer.shapes)
            after[row] = run(replaced(batches.more, row), others[row].note)
        found = _plan(fewer, more, others, len(batches.more))
        for row, losses in after.items():
            _check_losses_keep(batches.more, before, row, losses)
        shared = any(site.shared for sites in found.calls.values() for site in sites)
        if found == known or not (more.meets or shared):
            if len(batches.fewer) <= TRACED:  # else a call in training is traced on a whole batch
                _check_every_row(run, found, batches, fewer, more, before)
            return found
        known = found
    raise UserError("Layers of inputs that all examples share follow each other too deep to be traced: freeze them.")


def _check_losses_keep(batch: Sequence[int], before: Tensor, row: int, losses: Tensor) -> None:
    """Refuse losses (n,) that moved with the example of a row that is not theirs."""
    for other in moved_losses(before, losses, 1e-3):
        if other != row:
            raise MixedExamples(
                f"Example {batch[other]} has loss {float(before[other]):.6g} among some examples and "
                f"{float(losses[other]):.6g} among others",
                "so no example's influence is bounded: compute each loss from its own example alone.",
                MIXES,
            )


def _check_every_row(run: Run, plan: ClipPlan, batches: Batches, fewer: Tracer, more: Tracer, before: Tensor) -> None:
    """Replace each row once, for what follows one row alone: the first, the last, one that stands out.

    A replaced example leaves the batch, if no shape changes by that; else it has a second row in the batch.

    Args:
        more, before: what the pass on `batches.more` has shown, and its losses.
    """

    def keeps_shapes(batch: list[int], row: int, base: Tracer, before: Tensor) -> bool:
        """Whether the example of a row could be replaced; if so, nothing else has moved."""
        once, other = batch.count(batch[row]) == 1, Tracer(plan, batches, fewer.shapes)
        try:
            losses = run(replaced(batch, row), other.note)
        except MixedExamples:  # a shape that does not follow the size of the batch
            if not once:
                raise
            return False
        if once and other.shapes != base.shapes:
            return False
        _check_losses_keep(batch, before, row, losses)
        for (label, nth), seen in base.seen.items():
            _check_row(label, plan.calls[label][nth], seen, other.seen.get((label, nth)), row, len(batch))
        return True

    twice = [batches.more.count(example) > 1 for example in batches.more]
    for row in range(len(twice)):
        if twice[row] and row not in REPLACED:
            keeps_shapes(batches.more, row, more, before)
    if all(keeps_shapes(batches.more, row, more, before) for row in range(len(twice)) if not twice[row]):
        return
    batch, base = batches.swapped, Tracer(plan, batches, fewer.shapes)
    before = run(batch, base.note)
    for row, example in enumerate(batch):
        if batch.count(example) > 1:
            keeps_shapes(batch, row, base, before)


def _check_row(label: str, site: CallSite, seen: Seen, there: Seen | None, row: int, n: int) -> None:
    """Refuse an input of which other rows moved than those of the example that was replaced."""
    if there is None or there.shape != seen.shape:
        _refuse(label, seen.shape, f"gets another number of rows when one example is replaced: {CHOSEN}")
    own = set() if site.shared else set(site.layouts[0].rows_of(len(seen.rows), slice(row, row + 1)).tolist())
    if moved := sorted(set(moved_rows(seen.rows, there.rows)) - own):
        _refuse(label, seen.shape, f"has rows {moved[:6]} that follow example {row} of {n}, mixed or in another order")


def _plan(fewer: Tracer, more: Tracer, others: Mapping[int, Tracer], examples: int) -> ClipPlan:
    """The plan that the passes show; `others` by the row of the example that was replaced."""
    for tracer in (fewer, *others.values()):
        for label, _ in sorted(tracer.shapes.keys() ^ more.shapes.keys()):
            what = "is used more often in some batches than in others (call it once for a batch, not for each example)"
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
    """From the input's rows that moved with each example that was replaced; None where they do not tell the order."""
    if seen.axis is None:
        if any(moved.values()):
            _refuse(label, seen.shape, "has no axis for the batch and follows the examples")
        return CallSite(shared=frozenset({seen.shape}))
    each = len(seen.rows) // examples
    grouped, tiled = (
        all(rows <= set(layout.rows_of(len(seen.rows), slice(row, row + 1)).tolist()) for row, rows in moved.items())
        for layout in (Layout(each=each, order=order) for order in (Order.GROUPED, Order.TILED))
    )
    if not (grouped or tiled):
        row, rows = next((row, rows) for row, rows in moved.items() if rows)
        what = f"has rows {sorted(rows)[:6]} that follow example {row} of {examples}"
        sorted_by_expert = f" (experts sort them; {EXPERTS})" if "expert" in label else ""
        _refuse(label, seen.shape, f"{what}, mixed or in another order{sorted_by_expert}")
    if each > 1 and not any(moved.values()):  # no example's data are in it; the rows that repeat are each example's
        tiled = not moved_rows(seen.rows[:examples], seen.rows[:1].expand(examples, 2))
        grouped = not moved_rows(seen.rows[:each], seen.rows[each : 2 * each])
        if grouped == tiled:
            return None
    elif each > 1 and grouped and tiled:
        _refuse(label, seen.shape, f"has {each} rows for each example, too few of which follow it to tell their order")
    return CallSite((Layout(seen.axis, each, Order.GROUPED if grouped or each == 1 else Order.TILED),))


def _like_others(label: str, seen: Seen, examples: int, layouts: set[Layout]) -> CallSite:
    """Of an input whose rows are all alike, or of no example: in the order of the others with as many of them."""
    assert seen.axis is not None
    each = seen.shape[seen.axis] // examples
    orders = {layout.order for layout in layouts if layout.each == each}
    if len(orders) != 1:
        _refuse(label, seen.shape, f"has {each} rows for each example that hold nothing of it")
    return CallSite((Layout(seen.axis, each, orders.pop()),))


def _refuse(label: str, shape: tuple[int, ...], what: str) -> NoReturn:
    """Refuse the call of a layer or parameter, whose input has this shape."""
    raise MixedExamples(
        f"{label} (input {shape}) {what}",
        "so it is unknown which rows are an example's own, and no example's influence is bounded: compute each "
        "example's loss from that example alone, in the order of the batch, or freeze the layer.",
    )


def _explained(error: MixedExamples, runs: Runs, batches: Batches) -> UserError:
    """What a trace has refused, and the module in which examples first meet, if plain passes show one."""
    more = batches.more
    if place := runs.first_difference(more, more, range(len(more))):
        return UserError(
            f"The model gives other losses when it runs again on the same examples and random numbers{place}: no state "
            "may change from one forward pass to the next, nor randomness come from a generator that cannot be seeded."
        )
    for batch in (more, batches.swapped):
        for row in range(len(batch)):
            if place := runs.first_difference(batch, replaced(batch, row), [i for i in range(len(batch)) if i != row]):
                return UserError(f"{error.what}{MIXES}{place}, {error.remedy}")
    return UserError(str(error))
