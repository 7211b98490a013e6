"""Replaces the forwards of a model's layers while the engine's passes run, and only then.

Meanwhile parameters of the model that a module reads as its attributes are `PerExample` ones, and layers take theirs
from `_parameters`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from groupwise.clipping.calls import LayerCalls, Values
from groupwise.clipping.groups import ClippingGroup, Member
from groupwise.clipping.layouts import Layout
from groupwise.clipping.parameter_uses import ModuleWeights, ParameterUse
from groupwise.clipping.partition import Layer, batch_norms, refuse_batch_statistics
from groupwise.clipping.per_example import PerExample, align
from groupwise.clipping.rules.weights import Forward
from groupwise.errors import UserError


def _is_replaced(module: nn.Module) -> bool:
    """Whether its forward is not its class's."""
    forward = module.__dict__.get("forward")
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own


class Patches:
    """The forwards of an engine's layers that clip, and the parameters that modules read.

    Args:
        model: the model; its BatchNorm layers refuse to train.
        layers: its layers, whose `forward` nobody else may have replaced.
        groups: their groups.
        calls: runs layers inside their groups.
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
        direct: bool,
    ) -> None:
        self.calls = calls
        members = {member.name: (group, member) for group in groups for member in group.members}
        self._attributes: list[tuple[dict[str, Any], str, Any]] = [
            (norm.__dict__, "forward", partial(self._run_batch_norm, name, norm, norm.forward))
            for name, norm in batch_norms(model)
        ]
        """What stands in place of what, while a pass runs: a module's own attributes, a name and its value."""
        for layer in layers:
            forward: Callable[..., Any] | None = None
            if layer.rewritten is not None and not direct:
                forward = partial(self._run_rewritten, layer.module, layer.rewritten)
            elif layer.rule is not None:
                if _is_replaced(layer.module):
                    raise UserError(
                        f"Layer {layer.name!r} has its forward replaced already: take off what wraps it first."
                    )
                run = self._run_direct if direct else self._run_layer
                forward = partial(run, layer.module, *members[layer.name])
            if forward is not None:
                self._attributes.append((layer.module.__dict__, "forward", torch.compiler.disable(forward)))
        if not direct:
            self._read_as_copies(layers)

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
                self._attributes.append((layer.module.get_submodule(inside).__dict__, own, known[id(parameter)]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, layers clip; afterwards the model is as it was."""
        before = [own.get(name) for own, name, _ in self._attributes]
        try:
            for own, name, value in self._attributes:
                own[name] = value
            yield
        finally:
            for (own, name, _), value in zip(self._attributes, before, strict=True):
                if value is None:
                    own.pop(name, None)
                else:
                    own[name] = value

    def _run_rewritten(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        axis = 0 if getattr(module, "batch_first", True) else 1
        recurrent = isinstance(module, nn.RNNBase)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        copies = [leaf for leaf in tensors if isinstance(leaf, PerExample)]
        weights = ModuleWeights(module, self.calls)
        if not copies:
            return forward(weights, module, *args, **kwargs)

        mask: Any = kwargs.get("attn_mask", args[5] if len(args) > 5 else None)

        each = _rows_met(copies, (leaf for leaf in tensors if leaf is not mask), axis)
        guesses = each is not None and self.calls.traces  # where the batch is, may not be known yet

        def plain(leaf: Any, at: int) -> Any:
            if guesses:
                return leaf.like.detach() if _is_copy(leaf) else leaf
            if leaf is mask and _is_copy(leaf) and leaf.dim() == 2:  # (L, S), the same for all examples and heads
                return leaf.rows.repeat_interleave(module.num_heads, 0)
            return align(leaf, leaf.dim(), Layout(at, each or 1), type(module).__name__) if _is_copy(leaf) else leaf

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

    def _run_batch_norm(
        self, name: str, module: _BatchNorm, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if torch.is_grad_enabled():
            refuse_batch_statistics(name, module)
        return forward(*args, **kwargs)

    # -- layers ---------------------------------------------------------------------------------------------------

    def _run_layer(self, module: nn.Module, group: ClippingGroup, member: Member, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
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
        if not torch.is_grad_enabled():
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


def _rows_met(copies: Sequence[PerExample], inputs: Iterable[Tensor], axis: int) -> int | None:
    """How many rows an example has in the first input, like the copies, that holds the batch on that axis."""
    for x in inputs:
        if not _is_copy(x) and x.dim() == copies[0].dim() and x.is_floating_point():
            layout = copies[0].origin.layout_of(x)
            if layout is not None and layout.axis == axis:
                return layout.each
    return None


def _is_copy(leaf: Any) -> bool:
    return isinstance(leaf, PerExample)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1
