"""Runs layers and products inside their groups: finds where an input holds the batch, and the group's open pass.

Besides the model's own layers a group may have members that are none: a parameter that a module uses by itself, and
linear maps and embeddings inside a module. They are made when they are first used.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from groupwise.clipping.autograd import CopiesFunction, DirectFunction, LayerFunction, probe_of
from groupwise.clipping.groups import ClippingGroup, Member
from groupwise.clipping.layouts import FIRST, NONE, BatchAxis, Layout, ModelCall, Order
from groupwise.clipping.microbatches import GroupPass, OpenPasses
from groupwise.clipping.partition import COPIED
from groupwise.clipping.per_example import PerExample
from groupwise.clipping.precision import autocast
from groupwise.clipping.rules.base import LayerRule, RuleContext, find_rule
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.embedding_bag import BagRule
from groupwise.clipping.rules.linear import HFConv1DRule, LinearRule
from groupwise.clipping.rules.per_example import ParameterRule
from groupwise.errors import UserError

Values = list[Tensor | None]
"""The values of a layer's parameters, in the order of its rule's `parameter_names`."""


@dataclass(frozen=True)
class Use:
    """One parameter of a product: where it stands in its group (None: it does not train), and which rows are used."""

    place: int | None
    shape: torch.Size
    rows: slice | None = None
    padding_idx: int | None = None


class LayerCalls:
    """The calls of an engine's layers, while the model runs.

    Args:
        model: whose buffers and frozen parameters are the same for all examples.
        groups: the engine's.
        passes: where the passes of the groups are kept.
        context: what their rules share.
        batch_axis: which axis of an input counts examples where no call of the model tells it.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: tuple[ClippingGroup, ...],
        passes: OpenPasses,
        context: RuleContext,
        batch_axis: int,
    ) -> None:
        self.passes = passes
        self._model, self._context, self._axis = model, context, batch_axis
        self._constants: set[int] | None = None
        self._places = {id(p): (group, place) for group in groups for place, p in enumerate(group.parameters)}
        self._members: dict[tuple[object, ...], Member] = {}

    # -- the call of the model ------------------------------------------------------------------------------------

    @contextmanager
    def within(self, call: ModelCall) -> Iterator[None]:
        """Inside, layers belong to this call of the model."""
        self.passes.model_call = call
        try:
            yield
        finally:
            self.passes.model_call = self._constants = None

    def batch(self, label: str) -> int:
        """B of the model's call.

        Raises:
            UserError: naming what is used outside of a call, in one without a batch, or inside of `torch.func`.
        """
        _refuse_transforms(label)
        call = self.passes.model_call
        if call is None:
            raise UserError(
                f"{label} left the model as if it were the same for all examples: give the model its inputs as "
                "tensors, the batch first, each on its own (not end to end, by torch.cat), and do what the loss does "
                "with parameters inside the model."
            )
        if call.batch is None:
            raise UserError(
                f"{label} is used in a call without a tensor that has an axis for the batch, so it cannot be told how "
                "many examples there are: give the model its inputs as tensors, the batch first."
            )
        return call.batch

    def batch_axis_of(self, x: Tensor, label: str) -> BatchAxis | None:
        """Where a tensor that meets a parameter has its examples; None for a constant.

        Raises:
            UserError: it depends on the batch, and no axis of it has its size.
        """
        batch, call = self.batch(label), self.passes.model_call
        if x.dim() == 0 or not len(x):
            return None
        if batch == 1:
            return BatchAxis(0, len(x))
        assert call is not None
        if not x.requires_grad and not call.is_given(x) and self._is_constant(x):
            return None
        layout = self.passes.layouts.of(_meeting(label, x), x, batch, True, call.is_given, alike=False)
        if layout.order is Order.NONE:
            call.turned |= call.is_given(x) and batch in x.shape
            return None
        self.passes.note(label, layout)
        return BatchAxis(1 if layout.order is Order.SECOND else 0, layout.each, layout.certain)

    def was_certain(self, label: str, x: Tensor, place: BatchAxis) -> bool:
        """Whether it is certain that x, which depends on the batch, has its examples there, and was when this call of
        the model first asked: what a checkpoint runs once more, after gradients have shown it, must go the same way."""
        call = self.passes.model_call
        assert call is not None
        certain = place.certain and (x.requires_grad or call.is_given(x))
        return call.certain.setdefault((label, x.shape, place.order), certain) and certain

    def doubt(self, group: ClippingGroup, label: str, x: Tensor, place: BatchAxis) -> None:
        """Gradients must show that a parameter met the batch on the axis that was taken for it."""
        group_pass = self.passes.open[group.index]
        group_pass.uncertain = True
        group_pass.doubts.add((_meeting(label, x), x.shape, place.order))

    def _is_constant(self, x: Tensor) -> bool:
        if self._constants is None:
            frozen = (p for p in self._model.parameters() if not p.requires_grad)
            self._constants = {t.untyped_storage().data_ptr() for t in (*self._model.buffers(), *frozen)} - {0}
        return x.untyped_storage().data_ptr() in self._constants

    # -- members that are no layers of the model ------------------------------------------------------------------

    def place_of(self, parameter: nn.Parameter) -> tuple[ClippingGroup, int] | None:
        """The group of a parameter that trains, and its place there."""
        return self._places.get(id(parameter))

    def product(self, kind: str, group: ClippingGroup, uses: tuple[Use | None, ...]) -> Member:
        """A layer of a group's parameters: its weight and its bias, if that trains.

        Args:
            kind: what it does with them: "linear", "transposed" (linear, with a weight (d, p)), "embedding" or "bags".
            group: whose parameters they are.
            uses: one for each parameter; None where there is none, or it does not train.
        """
        key = (
            kind,
            group.index,
            *((u.place, u.rows and (u.rows.start, u.rows.stop), u.shape, u.padding_idx) for u in uses if u),
        )
        if key not in self._members:
            weight = uses[0]
            assert weight is not None
            rule: LayerRule
            with torch.device("meta"):
                if kind in ("embedding", "bags"):
                    table = nn.Embedding(weight.shape[0], weight.shape[1], weight.padding_idx)
                    rule = EmbeddingRule(table) if kind == "embedding" else BagRule(table)
                else:
                    kinds = {"linear": LinearRule, "transposed": HFConv1DRule}
                    rule = kinds[kind](nn.Linear(weight.shape[1], weight.shape[0], any(uses[1:])))
            places = tuple(None if u is None else u.place for u in uses)
            name = next(group.names[place] for place in places if place is not None)
            rows = tuple(None if u is None else u.rows for u in uses)
            wanted = tuple(place is not None for place in places)
            context = self._context.for_layer()
            self._members[key] = Member(name, rule, wanted, places, context, rows if any(rows) else ())
        return self._members[key]

    def copies(self, group: ClippingGroup, place: int, batch: int) -> Tensor:
        """A parameter's copies (B, *shape), made once a forward pass."""
        key = ("parameter", group.index, place)
        if key not in self._members:
            home, local = group.homes[place]
            if find_rule(home) is not None and home.get_parameter(local).numel() > COPIED and batch > 1:
                warnings.warn(
                    f"groupwise has no rule for what is done with {group.names[place]} beside its layer: it is clipped "
                    "exactly, with a gradient for each example in memory. Linear maps (F.linear, @) need none.",
                    stacklevel=2,
                )
            rule = ParameterRule(home, local)
            self._members[key] = Member(group.names[place], rule, (True,), (place,), self._context.for_layer())
        member, parameter = self._members[key], group.parameters[place]
        group_pass = self.passes.open.get(group.index)
        if group_pass is not None and group_pass.batch == batch and place in group_pass.copies:
            return group_pass.copies[place]
        group_pass, probe = self.enter(group, member, batch, parameter.device)
        copies: Tensor = CopiesFunction.apply(group_pass, member, probe, parameter.detach())
        group_pass.copies[place] = copies
        return copies

    # -- calls of layers ------------------------------------------------------------------------------------------

    def enter(
        self, group: ClippingGroup, member: Member, batch: int, device: torch.device
    ) -> tuple[GroupPass, Tensor | None]:
        """The group's pass for a call with B examples, and its probe."""
        group_pass = self.passes.pass_of(group, member, batch)
        return group_pass, probe_of(group_pass, device)

    def run(
        self,
        group: ClippingGroup,
        member: Member,
        x: Tensor,
        values: Values,
        batch_first: bool = False,
        layout: Layout | None = None,
    ) -> Tensor:
        """A layer's output for an input x of any layout, or of the one that is given, with its parameters' values."""
        _refuse_transforms(member.label)
        if isinstance(x, PerExample):
            return PerExample.of_rows(self._run_rows(group, member, x.rows, values), _output_of(self, group, member))
        if layout is not None:
            batch = self.batch(member.label)
        else:
            layout, batch = self.layout_of(member, x, batch_first)
        if layout.order is Order.NONE:
            return self._without_batch(group, member, x, values, batch)
        inputs, values = autocast(member.rule.autocast, x, values)
        group_pass, probe = self.enter(group, member, batch, x.device)
        group_pass.uncertain |= not layout.certain
        self.passes.note(member.label, layout)
        y: Tensor = LayerFunction.apply(group_pass, member, layout, values, probe, inputs)
        return y

    def run_direct(self, group: ClippingGroup, member: Member, x: Tensor, parameters: Values) -> Tensor:
        """A layer's output where it returns its parameters' gradients itself; x has the batch as its first axis."""
        _refuse_transforms(member.label)
        x, _ = autocast(member.rule.autocast, x, [])
        group_pass, probe = self.enter(group, member, x.shape[0], x.device)
        y: Tensor = DirectFunction.apply(group_pass, member, probe, x, *parameters)
        return y

    def layout_of(self, member: Member, x: Tensor, batch_first: bool) -> tuple[Layout, int]:
        """How a layer's input holds the batch, and B."""
        known = self.passes.model_call
        batch = known.batch if known is not None and known.batch is not None else x.shape[self._axis]
        given = known.is_given if known is not None else lambda _: True
        if batch > 1 and not x.requires_grad and not given(x) and self._is_constant(x):
            return NONE, batch
        any_order = member.rule.features_last and not batch_first
        layout = self.passes.layouts.of(member.label, x, batch, any_order, given)
        if known is not None and layout.order is Order.NONE:
            known.turned |= given(x) and batch in x.shape
        return layout, batch

    def _run_rows(self, group: ClippingGroup, member: Member, rows: Tensor, values: Values) -> Tensor:
        """The output for each example's own input, rows (B, ...)."""
        batch, each = len(rows), rows.shape[1] if member.rule.has_batch(rows.dim() - 1) else 0
        alike = each > 1 and rows.stride(1) == 0  # a parameter that was expanded: one stands for all
        if each:
            rows = (rows[:, :1] if alike else rows).flatten(0, 1)
        layout = FIRST if each < 2 or alike else Layout(Order.FOLDED, each)
        inputs, values = autocast(member.rule.autocast, rows, values)
        group_pass, probe = self.enter(group, member, batch, rows.device)
        y: Tensor = LayerFunction.apply(group_pass, member, layout, values, probe, inputs)
        y = y.unflatten(0, (batch, -1)) if each else y
        return y.expand(-1, each, *y.shape[2:]) if alike else y

    def _without_batch(self, group: ClippingGroup, member: Member, x: Tensor, values: Values, batch: int) -> PerExample:
        """The output for an input that all examples share; it has a copy for each of them once it is used."""
        with torch.no_grad():
            inputs, lowered = autocast(member.rule.autocast, x, values)
            like, _ = member.rule.forward(inputs, *lowered)
        made: list[Tensor] = []

        def make() -> Tensor:
            if not made:
                made.append(self._run_rows(group, member, x.unsqueeze(0).expand(batch, *x.shape), values))
            return made[0]

        return PerExample(make, like, _output_of(self, group, member))


class GroupOrigin:
    """A `per_example.Origin` in a group: what a layer made of an input without a batch axis, or a parameter."""

    def __init__(self, calls: LayerCalls, group: ClippingGroup, label: str) -> None:
        self.calls, self.group, self.label = calls, group, label

    def batch_axis_of(self, x: Tensor) -> BatchAxis | None:
        """See `per_example.Origin`."""
        return self.calls.batch_axis_of(x, self.label)

    def doubt(self, x: Tensor, place: BatchAxis) -> None:
        """See `per_example.Origin`."""
        self.calls.doubt(self.group, self.label, x, place)


def _output_of(calls: LayerCalls, group: ClippingGroup, member: Member) -> GroupOrigin:
    return GroupOrigin(calls, group, f"The output of layer {member.name!r}")


def _refuse_transforms(label: str) -> None:
    """Refuse what runs inside of `torch.func` or `torch.autograd.forward_ad`, whose tensors hide the batch.

    Raises:
        UserError: naming the layer or parameter.
    """
    functorch: Any = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise UserError(
            f"{label} is used inside of torch.func (vmap, grad, jvp, jacrev) or forward-mode derivatives, where the "
            "examples cannot be told apart: use it on the whole batch (derivatives by finite differences), or freeze "
            "it."
        )


def _meeting(label: str, x: Tensor) -> str:
    return f"{label}, which meets {'numbers' if x.is_floating_point() else 'indices'},"
