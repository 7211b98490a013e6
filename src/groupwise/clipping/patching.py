"""Replaces the forwards of a model and its layers, on the instance, and puts them back at the end.

The outermost module that is called tells how many examples there are, from its first tensor. While it runs, parameters
of the model that a module reads as its attributes are `PerExample` ones, and layers take theirs from `_parameters`.
Copies of the model are plain ones.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from groupwise.clipping.calls import LayerCalls, Values
from groupwise.clipping.groups import ClippingGroup, Member
from groupwise.clipping.layouts import BatchAxis, ModelCall
from groupwise.clipping.parameter_uses import ModuleWeights, ParameterUse
from groupwise.clipping.partition import Layer, batch_norms, refuse_batch_statistics
from groupwise.clipping.per_example import PerExample, align
from groupwise.clipping.rules.weights import Forward
from groupwise.errors import UserError


class _Instead(partial[Any]):
    """What a module runs instead of its forward; a copy of it, deep or pickled, is the forward that the module had.

    The copy's module has an attribute of it, a bound method where the forward was its class's, as nothing that is
    copied can leave itself out.
    """

    module: nn.Module
    before: Callable[..., Any] | None
    """Of the module's own attributes; None where the forward was its class's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        made: nn.Module = copy.deepcopy(self.module, memo)  # under way, so that the forward found is its class's
        return made.forward

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.module, "forward")) if self.before is None else (partial, (self.before,))


def _is_replaced(module: nn.Module) -> bool:
    """Whether its forward is not its class's."""
    forward = module.__dict__.get("forward")
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own


class Patches:
    """The replaced forwards of an engine's model and layers.

    Args:
        model: the model; its BatchNorm layers refuse to train.
        layers: its layers, whose `forward` nobody else may have replaced.
        groups: their groups.
        calls: runs layers inside their groups.
        batch_axis: which axis of the model's first input counts examples.
        direct: layers return their parameters' gradients themselves.

    Raises:
        UserError: a layer's forward is replaced already.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        groups: tuple[ClippingGroup, ...],
        calls: LayerCalls,
        batch_axis: int,
        direct: bool,
    ) -> None:
        self.calls, self._off, self._axis = calls, False, batch_axis
        for layer in layers:
            if _is_replaced(layer.module) and layer.rule is not None:
                raise UserError(
                    f"Layer {layer.name!r} has its forward replaced already: detach the other engine or wrapper first."
                )
        members = {member.name: (group, member) for group in groups for member in group.members}
        self._before: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._read: list[tuple[nn.Module, str, PerExample]] = []
        for name, norm in batch_norms(model):
            self._wrap(norm, partial(self._run_batch_norm, name))
        wrapped, clipped = {id(model): model}, {id(layer.module) for layer in layers if layer.rule or layer.rewritten}
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
                self._wrap(module, self._run_outermost)
        if not direct:
            self._read_as_copies(layers)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        instead, before = _Instead(forward), module.__dict__.get("forward")
        instead.module, instead.before = module, before
        self._before.append((module, before))
        module.forward = instead  # type: ignore[method-assign]

    def _wrap(self, module: nn.Module, run: Callable[..., Any]) -> None:
        inner = module.forward
        self._replace(module, partial(run, module, inner))
        update_wrapper(module.forward, inner)  # libraries look at a forward's arguments

    def _read_as_copies(self, layers: tuple[Layer, ...]) -> None:
        known: dict[int, PerExample] = {}
        for layer in layers:
            for local, parameter in layer.trainable.items():
                if id(parameter) not in known:
                    found = self.calls.place_of(parameter)
                    assert found is not None, "every parameter that trains is in a group"
                    use = ParameterUse(self.calls, *found, parameter, layer.full_name(local))
                    known[id(parameter)] = PerExample(use.copies, parameter.detach(), use, source=True)
                inside, _, own = local.rpartition(".")
                self._read.append((layer.module.get_submodule(inside), own, known[id(parameter)]))

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
        for module, before in reversed(self._before):
            module.__dict__.pop("forward", None)
            if before is not None:
                module.forward = before  # type: ignore[method-assign]
        self._before = []

    # -- the outermost module -------------------------------------------------------------------------------------

    def _run_outermost(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._idle() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with self._called(ModelCall(args, kwargs, self._axis)):
            made = forward(*args, **kwargs)
            return tree_map(self._as_batch, made) if any(map(_is_copy, tree_leaves(made))) else made

    def _as_batch(self, leaf: Any) -> Any:
        """An output that shapes took for the same for all examples, with as many rows as there are: each one's own."""
        call, place = self.calls.passes.model_call, BatchAxis(0, certain=False)
        if not _is_copy(leaf) or call is None or call.turned or leaf.shape[:1] != (call.batch,):
            return leaf
        rows = align(leaf, leaf.dim(), place, "the model's output")
        leaf.origin.doubt(leaf, place)
        return rows

    def _idle(self) -> bool:
        """Whether a module is not the outermost one, or nothing is clipped."""
        passes = self.calls.passes
        recomputing = passes.backward_pass is not None
        return self._off or passes.model_call is not None or recomputing or not torch.is_grad_enabled()

    @contextmanager
    def _called(self, call: ModelCall) -> Iterator[None]:
        try:
            for owner, name, copies in self._read:
                owner.__dict__[name] = copies
            with self.calls.within(call):
                yield
        finally:
            for owner, name, _ in self._read:
                owner.__dict__.pop(name, None)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside a backward pass: what runs once more (checkpointing) finds parameters as in its forward pass."""
        passes = self.calls.passes
        call = next((each.model_call for each in passes.open.values() if each.model_call), None)
        with nullcontext() if call is None or passes.model_call is not None else self._called(call):
            yield

    def _run_rewritten(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        axis = 0 if getattr(module, "batch_first", True) else 1
        if not self._idle():
            with self._called(ModelCall(args, kwargs, axis)):
                return self._rewritten(module, forward, axis, args, kwargs)
        return self._rewritten(module, forward, axis, args, kwargs)

    def _rewritten(
        self, module: nn.Module, forward: Forward, axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self.calls.passes.model_call
        if isinstance(module, nn.EmbeddingBag) and call is not None:
            offsets = kwargs.get("offsets", args[1] if len(args) > 1 else None)
            bags = 0 if offsets is None else len(offsets) - bool(module.include_last_offset)
            counted = call.counted == id(args[0] if args else kwargs.get("input"))
            if bags and (counted or not call.batch or bags % call.batch):  # the input's first axis is no batch
                call.batch = bags
        recurrent = isinstance(module, nn.RNNBase)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        copies = [leaf for leaf in tensors if isinstance(leaf, PerExample)]
        weights = ModuleWeights(module, self.calls)
        if not copies:
            return forward(weights, module, *args, **kwargs)

        mask: Any = kwargs.get("attn_mask", args[5] if len(args) > 5 else None)

        met = _met_by(copies, (leaf for leaf in tensors if leaf is not mask), axis)
        each = 1 if met is None else met[1].each

        def plain(leaf: Any, at: int) -> Any:
            if leaf is mask and _is_copy(leaf) and leaf.dim() == 2:  # (L, S), the same for all examples and heads
                return leaf.rows.repeat_interleave(module.num_heads, 0)
            return align(leaf, leaf.dim(), BatchAxis(at, each), type(module).__name__) if _is_copy(leaf) else leaf

        first, rest = (args[:1], args[1:]) if recurrent else (args, ())
        args = (*tree_map(lambda t: plain(t, axis), first), *tree_map(lambda t: plain(t, 1), rest))
        kwargs = {
            k: tree_map(lambda t, k=k: plain(t, 1 if k == "hx" and recurrent else axis), v) for k, v in kwargs.items()
        }
        if met is not None and not met[1].certain:  # asked now that their rows are made, which opens a group's pass
            for copy in copies:
                copy.origin.doubt(*met)
        made = forward(weights, module, *args, **kwargs)
        if len(copies) < len(tensors) or any(copy.shape[axis] != 1 for copy in copies if copy.dim() > axis):
            return made
        origin = copies[0].origin  # nothing of it holds the batch, so neither does the result
        return tree_map(
            lambda t: PerExample.of_rows(t.movedim(axis, 0).unsqueeze(axis + 1), origin) if _is_wide(t) else t, made
        )

    def _run_batch_norm(
        self, name: str, module: _BatchNorm, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._off and torch.is_grad_enabled():
            refuse_batch_statistics(name, module)
        return forward(*args, **kwargs)

    # -- layers ---------------------------------------------------------------------------------------------------

    def _run_layer(self, module: nn.Module, group: ClippingGroup, member: Member, *args: Any, **kwargs: Any) -> Any:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule, x = member.rule, _input_of(module, member, args, kwargs)
        values: Values = rule.values()
        for place, value in zip(member.places, values, strict=True):
            if place is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                raise UserError(
                    f"Layer {member.name!r} of the attached model got a tensor in the place of its parameter "
                    f"{group.names[place]!r} (by functional_call, say), which cannot be clipped: compute it inside a "
                    "module (torch.nn.utils.parametrize)."
                )
        return self.calls.run(group, member, x, values)

    def _run_direct(self, module: nn.Module, group: ClippingGroup, member: Member, *args: Any, **kwargs: Any) -> Tensor:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule = member.rule
        parameters = rule.values()  # whole tensors now, shards in between
        for name, parameter, wanted in zip(rule.parameter_names, parameters, member.wanted, strict=True):
            if wanted and parameter is not None and parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Layer {member.name!r} got its {name} in {parameter.dtype}, in which a clipped sum may outgrow "
                    "its threshold: let fully_shard keep float32 (no param_dtype), and use autocast for speed."
                )
        return self.calls.run_direct(group, member, _input_of(module, member, args, kwargs), parameters)


def _input_of(module: nn.Module, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A layer's input, as its rule takes it; other arguments are refused."""
    if len(args) + len(kwargs) != 1:
        raise UserError(
            f"Layer {member.name!r} ({type(module).__name__}) was called with {len(args) + len(kwargs)} arguments, "
            "and it is clipped for calls with its input alone: leave the others out, or freeze it."
        )
    return member.rule.prepare(args[0] if args else next(iter(kwargs.values())))


def _met_by(copies: Sequence[PerExample], inputs: Iterable[Tensor], axis: int) -> tuple[Tensor, BatchAxis] | None:
    """The first input, like the copies, that has the batch on that axis, and where it has it."""
    for x in inputs:
        if _is_copy(x) or x.dim() != copies[0].dim() or not x.is_floating_point():
            continue
        place = copies[0].origin.batch_axis_of(x)
        if place is not None and place.axis == axis:
            return x, place
    return None


def _is_copy(leaf: Any) -> bool:
    return isinstance(leaf, PerExample)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1
