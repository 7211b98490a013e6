"""How layers and parameters find their group: forwards are replaced, on the instance, and put back at the end.

The outermost module that is called tells how many examples there are, from its first tensor. While it runs, parameters
of the model that a module reads as its attributes are `PerExample` ones, and layers take theirs from `_parameters`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from groupwise.clipping.costs import Shared
from groupwise.clipping.discovery import Layer
from groupwise.clipping.flight import Flights
from groupwise.clipping.functions import DirectFunction, LayerFunction
from groupwise.clipping.gate import GroupState, Member, autocast
from groupwise.clipping.layouts import FIRST, BatchAxis, Layout, Order
from groupwise.clipping.module_weights import ModuleWeights
from groupwise.clipping.origins import Call, LayerOutput, ParameterUse
from groupwise.clipping.parts import Parts
from groupwise.clipping.per_example import PerExample, align
from groupwise.clipping.rules.weights import Forward
from groupwise.errors import UserError


class Patches:
    """The replaced forwards of an engine's model and layers.

    Args:
        model: the model.
        layers: its layers, whose `forward` nobody else may have replaced.
        groups: their groups.
        flights: where their passes are kept.
        shared: what the layers have in common.
        batch_axis: which axis of the model's first input counts examples.
        direct: layers return their parameters' gradients themselves.

    Raises:
        UserError: a layer's forward is replaced already.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        groups: tuple[GroupState, ...],
        flights: Flights,
        shared: Shared,
        batch_axis: int,
        direct: bool,
    ) -> None:
        self.flights, self._off, self._axis, self._model = flights, False, batch_axis, model
        self._call: Call | None = None
        self._constants: set[int] | None = None
        self.parts = Parts(flights, shared)
        for layer in layers:
            if "forward" in layer.module.__dict__ and layer.rule is not None:
                raise UserError(
                    f"Layer {layer.name!r} has its forward replaced already: detach the other engine or wrapper first."
                )
        members = {member.name: (group, member) for group in groups for member in group.members}
        self._before: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._read: list[tuple[nn.Module, str, PerExample]] = []
        wrapped, clipped = {id(model): model}, {id(layer.module) for layer in layers if layer.rule or layer.rewritten}
        self._at = {id(p): (group, place) for group in groups for place, p in enumerate(group.parameters)}
        for layer in layers:
            if layer.rewritten is not None and not direct:
                self._replace(
                    layer.module, torch.compiler.disable(partial(self._run_rewritten, layer.module, layer.rewritten))
                )
            elif layer.rule is not None:
                group, member = members[layer.name]
                run = self._run_direct if direct else self._run_layer
                self._replace(layer.module, torch.compiler.disable(partial(run, layer.module, group, member)))
            else:
                wrapped[id(layer.module)] = layer.module
        for module in wrapped.values():
            if not direct and id(module) not in clipped:
                run = partial(self._run_outermost, module, module.forward)
                self._replace(module, update_wrapper(run, module.forward))  # libraries look at a forward's arguments
        if not direct:
            self._read_as_copies(layers)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def _read_as_copies(self, layers: tuple[Layer, ...]) -> None:
        known: dict[int, PerExample] = {}
        for layer in layers:
            for local, parameter in layer.trainable.items():
                if id(parameter) not in known:
                    use = ParameterUse(self, *self._at[id(parameter)], parameter, layer.full_name(local))
                    known[id(parameter)] = PerExample(use.copies, parameter.detach(), use, source=True)
                self._read.append((layer.module, local, known[id(parameter)]))

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside, layers run as if nothing had been replaced."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, before in self._before:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.forward = before  # type: ignore[method-assign]
        self._before = []

    # -- the outermost module -------------------------------------------------------------------------------------

    def _run_outermost(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._idle() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with self._called(Call(args, kwargs, self._axis)):
            return forward(*args, **kwargs)

    def _idle(self) -> bool:
        """Whether a module is not the outermost one, or nothing is clipped."""
        recomputing = self.flights.round is not None
        return self._off or self._call is not None or recomputing or not torch.is_grad_enabled()

    @contextmanager
    def _called(self, call: Call) -> Iterator[None]:
        self._call = self.flights.call = call
        try:
            for owner, name, copies in self._read:
                owner.__dict__[name] = copies
            yield
        finally:
            self._call = self._constants = self.flights.call = None
            for owner, name, _ in self._read:
                owner.__dict__.pop(name, None)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside a backward pass: what runs once more (checkpointing) finds parameters as in its forward pass."""
        call = next((group_pass.call for group_pass in self.flights.open.values() if group_pass.call), None)
        with nullcontext() if call is None or self._call is not None else self._called(call):
            yield

    def _run_rewritten(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        axis = 0 if getattr(module, "batch_first", True) else 1
        if not self._idle():
            with self._called(Call(args, kwargs, axis)):
                return self._rewritten(module, forward, axis, args, kwargs)
        return self._rewritten(module, forward, axis, args, kwargs)

    def _rewritten(
        self, module: nn.Module, forward: Forward, axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(module, nn.EmbeddingBag) and self._call is not None:
            offsets = kwargs.get("offsets", args[1] if len(args) > 1 else None)
            if offsets is not None:  # the input's first axis is no batch
                self._call.batch = len(offsets) - bool(module.include_last_offset)
        recurrent = isinstance(module, nn.RNNBase)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        copies = [leaf for leaf in tensors if isinstance(leaf, PerExample)]
        weights = ModuleWeights(module, self)
        if not copies:
            return forward(weights, module, *args, **kwargs)

        def plain(leaf: Any, at: int) -> Any:
            return align(leaf, leaf.dim(), BatchAxis(at), type(module).__name__) if _is_copy(leaf) else leaf

        first, rest = (args[:1], args[1:]) if recurrent else (args, ())
        args = (*tree_map(lambda t: plain(t, axis), first), *tree_map(lambda t: plain(t, 1), rest))
        kwargs = {
            k: tree_map(lambda t, k=k: plain(t, 1 if k == "hx" and recurrent else axis), v) for k, v in kwargs.items()
        }
        made = forward(weights, module, *args, **kwargs)
        if len(copies) < len(tensors) or any(copy.shape[axis] != 1 for copy in copies if copy.dim() > axis):
            return made
        origin = copies[0].origin  # nothing of it holds the batch, so neither does the result
        return tree_map(
            lambda t: PerExample.of_rows(t.movedim(axis, 0).unsqueeze(axis + 1), origin) if _is_wide(t) else t, made
        )

    def place_of(self, parameter: nn.Parameter) -> tuple[GroupState, int] | None:
        """The group of a parameter that trains, and its place there."""
        return self._at.get(id(parameter))

    def doubt(self, group: GroupState, label: str, x: Tensor, place: BatchAxis) -> None:
        """Gradients must show that a parameter met the batch on the axis that was taken for it."""
        group_pass = self.flights.open[group.index]
        group_pass.uncertain = True
        group_pass.doubts.add((_meeting(label, x), x.shape, place.order))

    def batch(self, label: str) -> int:
        """B of the outermost call."""
        if self._call is None:
            raise UserError(
                f"{label} left the model as if it were the same for all examples: give the model its inputs as "
                "tensors, the batch first, and do what the loss does with parameters inside the model."
            )
        if self._call.batch is None:
            raise UserError(
                f"{label} is used in a call without a tensor that has an axis for the batch, so it cannot be told how "
                "many examples there are: give the model its inputs as tensors, the batch first."
            )
        return self._call.batch

    def batch_axis_of(self, x: Tensor, label: str) -> BatchAxis | None:
        """Where a tensor that meets a parameter has its examples; None for a constant.

        Raises:
            UserError: it depends on the batch, and no axis of it has its size.
        """
        batch = self.batch(label)
        if x.dim() == 0 or not len(x):
            return None
        if batch == 1:
            return BatchAxis(0, len(x))
        assert self._call is not None
        if not x.requires_grad and not self._call.is_given(x) and self._is_constant(x):
            return None
        layout = self.flights.layouts.of(_meeting(label, x), x, batch, True, self._call.is_given, alike=False)
        if layout.order is Order.NONE:
            return None
        return BatchAxis(1 if layout.order is Order.SECOND else 0, layout.each, layout.certain)

    def _is_constant(self, x: Tensor) -> bool:
        if self._constants is None:
            self._constants = {b.untyped_storage().data_ptr() for b in self._model.buffers() if b.numel()}
        return x.untyped_storage().data_ptr() in self._constants

    # -- layers ---------------------------------------------------------------------------------------------------

    def _run_layer(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Any:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule = member.rule
        if len(args) + len(kwargs) != 1:
            raise UserError(
                f"Layer {member.name!r} ({type(module).__name__}) was called with {len(args) + len(kwargs)} arguments, "
                "and it is clipped for calls with its input alone: leave the others out, or freeze it."
            )
        x = rule.prepare(args[0] if args else next(iter(kwargs.values())))
        values = [module._parameters.get(name) for name in rule.parameter_names]
        return self.run(group, member, x, [None if value is None else value.detach() for value in values])

    def run(
        self, group: GroupState, member: Member, x: Tensor, values: list[Tensor | None], batch_first: bool = False
    ) -> Tensor:
        """A layer's output for an input x of any layout, with its parameters' values."""
        if isinstance(x, PerExample):
            return PerExample.of_rows(
                self._run_rows(group, member, x.rows, values), LayerOutput(self, group, member.name)
            )
        layout, batch = self.layout_of(member, x, batch_first)
        if layout.order is Order.NONE:
            return self._without_batch(group, member, x, values, batch)
        inputs, values = autocast(member.rule.autocast, x, values)
        group_pass = self.flights.pass_of(group, member, batch, x.device)
        group_pass.uncertain |= not layout.certain
        y: Tensor = LayerFunction.apply(group_pass, member, layout, group_pass.probe, inputs, *values)
        return y

    def layout_of(self, member: Member, x: Tensor, batch_first: bool) -> tuple[Layout, int]:
        """How a layer's input holds the batch, and B."""
        known = self._call
        batch = known.batch if known is not None and known.batch is not None else x.shape[self._axis]
        given = known.is_given if known is not None else lambda _: True
        any_order = member.rule.features_last and not batch_first
        return self.flights.layouts.of(member.label, x, batch, any_order, given), batch

    def _run_rows(self, group: GroupState, member: Member, rows: Tensor, values: list[Tensor | None]) -> Tensor:
        inputs, values = autocast(member.rule.autocast, rows, values)
        group_pass = self.flights.pass_of(group, member, len(rows), rows.device)
        return LayerFunction.apply(group_pass, member, FIRST, group_pass.probe, inputs, *values)

    def _without_batch(
        self, group: GroupState, member: Member, x: Tensor, values: list[Tensor | None], batch: int
    ) -> PerExample:
        """The output for an input that all examples share; it has a copy for each of them once it is used."""
        with torch.no_grad():
            inputs, lowered = autocast(member.rule.autocast, x, values)
            like, _ = member.rule.forward(inputs, *lowered)
        made: list[Tensor] = []

        def make() -> Tensor:
            if not made:
                made.append(self._run_rows(group, member, x.unsqueeze(0).expand(batch, *x.shape), values))
            return made[0]

        return PerExample(make, like, LayerOutput(self, group, member.name))

    def _run_direct(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Tensor:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule = member.rule
        x = rule.prepare(args[0] if args else next(iter(kwargs.values())))
        x, _ = autocast(rule.autocast, x, [])
        parameters = [getattr(module, name) for name in rule.parameter_names]  # whole tensors now, shards in between
        for name, parameter, wanted in zip(rule.parameter_names, parameters, member.wanted, strict=True):
            if wanted and parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Layer {member.name!r} got its {name} in {parameter.dtype}, in which a clipped sum may outgrow "
                    "its threshold: let fully_shard keep float32 (no param_dtype), and use autocast for speed."
                )
        group_pass = self.flights.pass_of(group, member, x.shape[0], x.device)
        return DirectFunction.apply(group_pass, member, group_pass.probe, x, *parameters)


def _meeting(label: str, x: Tensor) -> str:
    return f"{label}, which meets {'numbers' if x.is_floating_point() else 'indices'},"


def _is_copy(leaf: Any) -> bool:
    return isinstance(leaf, PerExample)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1
