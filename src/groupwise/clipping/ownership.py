"""Shows by gradients whose rows are whose: with loss i times w_i, the gradient of its rows is w_i times as long.

That is asked where shapes alone do not tell it, and where an operation in the graph may have put rows in another order.
It takes two backward passes, which change nothing and keep two numbers a row: a random projection and a norm. At first
sight a third repeats the first: a function whose backward changes what it keeps, as a fused loss may, is found out by
it. Later the second does that, as all of its rows must be those of the first, w_i times as long.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from groupwise.clipping.autograd import in_one_sentence
from groupwise.clipping.checks import layer_nodes
from groupwise.clipping.groups import Member
from groupwise.clipping.layouts import FOLDS, Layout, Layouts, Order
from groupwise.clipping.microbatches import GroupPass, OpenPasses
from groupwise.clipping.precision import full_float32, no_autocast
from groupwise.clipping.rules.per_example import ParameterRule
from groupwise.errors import UserError

PART = 1 << 20
"""Entries that are looked at at once."""

Directions = dict[tuple[torch.Size, torch.device], Tensor]
"""The random directions of gradients of one part, by shape and device."""


@dataclass(frozen=True)
class Rows:
    """What one backward pass told of a gradient: for axis 0 and, if there is one, axis 1 two numbers a row."""

    shape: torch.Size
    projections: tuple[Tensor, ...]
    """(rows,) each: the same random direction for both passes, so that no mixture of examples goes unnoticed."""
    lengths: tuple[Tensor, ...]
    """(rows,) each: norms."""

    @classmethod
    def of(cls, g: Tensor, directions: Directions) -> "Rows":
        """From a gradient of any shape, a part after the other: in float64 it would be twice as large as it is.

        Args:
            directions: those made so far, which are the same in all passes.
        """
        whole = g.detach().flatten(2) if g.dim() > 2 else g.detach().view(*g.shape, *[1] * (3 - g.dim()))
        sums = [whole.new_zeros(2, size, dtype=torch.float64) for size in whole.shape[:2]]
        for first, second in _parts(*whole.shape):
            part = whole[first, second].double()
            direction = directions.get((whole.shape, g.device))
            if direction is None:
                direction = _direction_of(whole.shape, first, second, g.device)
                if whole.numel() <= PART:
                    directions[whole.shape, g.device] = direction
            products, squares = part * direction, part.square()
            for axis, (place, other) in enumerate(((first, 1), (second, 0))):
                sums[axis][0, place] += products.sum((other, 2))
                sums[axis][1, place] += squares.sum((other, 2))
        told = sums[: min(g.dim(), 2)]
        return cls(g.shape, tuple(each[0] for each in told), tuple(each[1].sqrt() for each in told))

    def is_like(self, other: "Rows | None") -> bool:
        """Whether they are of the same gradient, but for rounding."""
        if other is None or other.shape != self.shape:
            return False
        pairs = zip(self.lengths, other.lengths, strict=True)
        return all(torch.allclose(one, two, rtol=1e-3, atol=1e-30, equal_nan=True) for one, two in pairs)


@dataclass(frozen=True)
class Owned:
    """A node of the graph, the shape of its output, and the orders in which every row is one example's."""

    node: Any
    shape: torch.Size
    orders: tuple[Order, ...]
    telling: tuple[int, ...]
    """How many rows have a gradient, along axis 0 and, if there is one, axis 1: zeros tell nothing."""


def find_owners(losses: Tensor, nodes: Sequence[Any], inputs: Sequence[Tensor], repeat: bool = True) -> list[Owned]:
    """Ask the graph of the losses, which stays as it is.

    Args:
        losses: (B,), B > 1.
        nodes: of the graph, with one output each; those that the losses do not reach are not in the answer.
        inputs: tensors that the nodes' gradients lead to.
        repeat: run the first pass again, so that a backward pass that is none to repeat is told by its name.

    Raises:
        UserError: the same backward pass gave other gradients when it ran again.
    """
    weights = telling_weights(len(losses))
    told: list[dict[int, Rows]] = []
    directions: Directions = {}
    plainly = losses.sum()
    for total in (plainly, (weights.to(losses) * losses).sum(), *[plainly] * repeat):
        rows: dict[int, Rows] = {}
        hooks = [node.register_prehook(partial(_note, rows, directions, i)) for i, node in enumerate(nodes)]
        try:
            torch.autograd.grad(total, list(inputs), retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        told.append(rows)
    plain, weighed = told[:2]
    if any(not rows.is_like(again.get(i)) for again in told[2:] for i, rows in plain.items()):
        raise UserError(
            "The losses' backward pass gives other gradients when it runs again: something in it (a fused loss, a "
            "hook, a torch.autograd.Function) changes what it keeps, in place, or draws random numbers. Use plain "
            "operations."
        )
    return [
        Owned(
            node,
            plain[i].shape,
            tuple(agreeing(plain[i], weighed[i], weights.to(losses.device))),
            tuple(map(_telling, plain[i].lengths)),
        )
        for i, node in enumerate(nodes)
        if i in plain and i in weighed
    ]


def _telling(lengths: Tensor) -> int:
    """How many rows are neither zero nor infinite; one that is alone among infinite ones tells as much as two."""
    finite = lengths[lengths.isfinite()]
    count = int((finite > 0).sum())
    return 2 if count == len(finite) == 1 and len(lengths) > 1 else count


def telling_weights(examples: int) -> Tensor:
    """Weights (B,) by which to tell examples apart, no two of 16 neighbours' alike, always the same for one B.

    Powers of 2, so that products with them are exact; by a generator of their own, for `verify` watches torch's.
    """
    generator = random.Random(examples)
    powers = [p for _ in range(0, examples, 16) for p in generator.sample(range(-8, 8), 16)]
    return torch.tensor([2.0**p for p in powers[:examples]], dtype=torch.float64)


def prove_layouts(
    losses: Tensor,
    passes: OpenPasses,
    doubted: bool,
    first: bool,
    recomputing: Callable[[], AbstractContextManager[None]],
) -> None:
    """See from gradients which rows of the layers' outputs are whose: where shapes do not tell or that is doubted, and,
    as a shape may be the batch's by chance, at the `first` sight of any layer's calls.

    Raises:
        UserError: a layer's rows, or a parameter's copies, are not one example's each.
    """
    layouts = passes.layouts
    new = {(label, tuple(patterns)) for label, patterns in passes.asked.items()} - layouts.shown
    passes.asked = {}
    doubted |= first and bool(new)
    running = [group_pass for group_pass in passes.open.values() if group_pass.probe is not None]
    doubted |= any(group_pass.uncertain or group_pass.batch != len(losses) for group_pass in running)
    if len(losses) < 2 or passes.backward_pass is not None or not running or not doubted:
        return
    with recomputing(), passes.looking(len(losses)), in_one_sentence(), no_autocast(losses.device.type), full_float32():
        owners = find_owners(losses, layer_nodes(losses), [p.probe for p in running if p.probe is not None], bool(new))
    telling = _settle(owners, running, layouts, len(losses), first)
    layouts.shown |= {(of, calls) for of, calls in new if telling[of] >= (len(calls) if of.startswith("Layer") else 1)}


def recording() -> bool:
    """Whether a CUDA graph records, which cannot be asked for values; it ran before it was recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def rows_as_losses(output: Tensor) -> Tensor:
    """A number for each row of an output (B, ...), (B,), that depends on all of the row."""
    if output.dim() == 1:
        return output
    numbers = torch.arange(output.numel(), device=output.device, dtype=torch.float64).view(output.shape)
    return (output * _direction(numbers).to(output.dtype)).flatten(1).sum(1)


def _direction_of(shape: torch.Size, first: slice, second: slice, device: torch.device) -> Tensor:
    """The random direction of a part of the entries of a shape, (rows, columns, depth)."""
    rows, columns, places = (
        torch.arange(start, stop, dtype=torch.float64, device=device)
        for start, stop in ((first.start, first.stop), (second.start, second.stop), (0, shape[2]))
    )
    return _direction((rows.view(-1, 1, 1) * shape[1] + columns.view(-1, 1)) * shape[2] + places)


def _direction(numbers: Tensor) -> Tensor:
    """From -1 to 1 without a pattern, for entries of these numbers; of no generator, for `verify` watches those."""
    hashed = numbers.long()
    for factor in (0x9E3779B1, 0x85EBCA6B):  # of which 32 bits count
        hashed = hashed.mul_(factor).bitwise_and_(0xFFFFFFFF)
        hashed ^= hashed >> 15
    return hashed.double().mul_(2.0**-31).sub_(1)


def _parts(rows: int, columns: int, depth: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of parts of at most `PART` entries, or of one column."""
    wide = max(1, min(columns, PART // max(1, depth)))
    high = max(1, PART // max(1, wide * depth))
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def _settle(
    owners: Sequence[Owned], passes: Sequence[GroupPass], layouts: Layouts, batch: int, again: bool
) -> Counter[str]:
    """Give every call the layout that its gradients have shown, and remember it for calls to come.

    Args:
        again: what rows without a gradient leave open is asked again; else (pipelines ask once) the order is taken.

    Returns:
        Of how many calls two rows or more had a gradient, by what messages call a layer, parameter or output.
    """
    telling: Counter[str] = Counter()
    shown: dict[tuple[str, int, bool], set[Order]] = {}
    silent: set[int] = set()  # groups with rows that no loss has reached
    for owned in owners:
        node, rule = owned.node, owned.node.member.rule
        parameter = isinstance(rule, ParameterRule)
        second = rule.features_last and not parameter and len(owned.shape) > 2  # (T, B, d): of (B, d) it is features
        orders = [o for o in owned.orders if o is not Order.SECOND or second]
        if not orders:
            _refuse(node.member, owned.shape, batch, parameter)
        order = node.layout.order if node.layout.order in orders else orders[0]
        axis = 1 if order is Order.SECOND else 0
        node.layout = Layout(order, owned.shape[axis] // batch)
        if owned.telling[axis] < 2:
            silent.add(id(node.group_pass))
            if again:
                continue
        else:
            for kind in ("Layer", "Parameter", "The output of layer"):
                telling[f"{kind} {node.member.name!r}"] += 1
        if len(orders) == 1 and not parameter:
            depends = getattr(node, "depends", node.needs_input_grad[-1])
            key = node.member.label, len(owned.shape) - 1, bool(depends)
            shown.setdefault(key, set()).add(order)
    for (label, rank, requires_grad), found in shown.items():
        layouts.prove(label, rank, requires_grad, found)
    for group_pass in passes:
        if id(group_pass) not in silent:
            layouts.trust(group_pass.doubts)
        group_pass.uncertain, group_pass.proven = False, True
    return telling


def refuse_doubts(passes: Iterable[GroupPass], examples: int) -> None:
    """Refuse a backward pass before whose beginning nobody could show whose rows are whose.

    Raises:
        UserError: naming a group.
    """
    for group_pass in passes:
        if group_pass.uncertain and examples > 1:
            raise UserError(
                f"The group of parameter {group_pass.group.names[0]!r} ran on shapes that do not tell which axis is "
                "the batch, which the gradients of one loss for each example would show: run a forward pass with "
                "another length of sequences or size of batch first, and give its output to engine.check_output."
            )


def _refuse(member: Member, shape: torch.Size, batch: int, parameter: bool) -> NoReturn:
    if parameter:
        raise UserError(
            f"Parameter {member.name!r} meets a tensor whose examples are on another axis than the one with the size "
            f"of the batch of {batch}, or in another order, so it cannot be told whose its gradients are: keep the "
            "batch as first axis there (experts of transformers: experts_implementation='batched_mm'); if that tensor "
            "holds no batch, run one of another size first, as make_private does with check= "
            "(groupwise.clipping.verify); or freeze the parameter."
        )
    raise UserError(
        f"{member.label} gives a tensor of shape {tuple(shape)}, which has no axis along which its rows belong to one "
        f"of the {batch} examples each (are examples mixed, compared, put in another order, or rows chosen by data?), "
        "so it cannot be told whose they are: keep the batch as first axis, or give batch_axis=1; let every example "
        "have all rows, with a mask or torch.where for the choice; freeze the layer; or, if its input holds no batch, "
        "run one of another size first, as make_private does with check= (groupwise.clipping.verify)."
    )


def _note(rows: dict[int, Rows], directions: Directions, at: int, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        rows[at] = Rows.of(gradients[0], directions)


def agreeing(plain: Rows, weighed: Rows, weights: Tensor) -> list[Order]:
    """The orders of a layer's output in which every row belongs to the example that its gradient comes from.

    Args:
        plain: of the gradient of Σ_i loss_i.
        weighed: of the gradient of Σ_i w_i·loss_i: w_i times the other, on the rows of example i.
        weights: w, (B,), powers of 2.
    """
    batch, found = len(weights), []
    for order in (Order.FIRST, Order.SECOND, Order.FOLDED, Order.STACKED):
        axis = 1 if order is Order.SECOND else 0
        rows = plain.shape[axis] if len(plain.shape) > axis else 0
        if rows == 0 or rows % batch or (order in FOLDS) != (rows > batch):
            continue
        each = rows // batch
        w = weights.repeat(each) if order is Order.STACKED else weights.repeat_interleave(each)
        expected = w * plain.lengths[axis]
        off = (weighed.projections[axis] - w * plain.projections[axis]).abs() + (weighed.lengths[axis] - expected).abs()
        finite = expected.isfinite()  # the others are left out of all sums
        most = expected[finite].max() if bool(finite.any()) else expected.new_zeros(())
        if bool((off <= 1e-4 * expected + 1e-9 * most)[finite].all()):
            found.append(order)
    return found
