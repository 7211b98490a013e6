"""How layers find their group: their `forward` is replaced, on the instance, and put back at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.discovery import Layer
from groupwise.clipping.flight import Flights
from groupwise.clipping.gate import DirectFunction, GroupState, LayerFunction, Member, autocast
from groupwise.clipping.rules.fallback import Call, FallbackForward, FallbackRule
from groupwise.errors import UserError


class Patches:
    """The replaced forwards of an engine's layers.

    Args:
        layers: the layers, whose `forward` nobody else may have replaced.
        groups: their groups.
        flights: where their passes are kept.
        direct: layers return their parameters' gradients themselves.

    Raises:
        UserError: a layer's forward is replaced already.
    """

    def __init__(
        self, layers: tuple[Layer, ...], groups: tuple[GroupState, ...], flights: Flights, direct: bool
    ) -> None:
        self._flights, self._off, self._modules = flights, False, [layer.module for layer in layers]
        for layer in layers:
            if "forward" in layer.module.__dict__:
                raise UserError(
                    f"Layer {layer.name!r} has its forward replaced already: detach the other engine or wrapper first."
                )
        places = {member.name: (group, member) for group in groups for member in group.members}
        for layer in layers:
            group, member = places[layer.name]
            run: Callable[..., Any] = self._run_direct if direct else self._run_layer
            if isinstance(member.rule, FallbackRule):
                member.rule.bypass, run = self.bypassed, self._run_fallback
            layer.module.forward = torch.compiler.disable(partial(run, layer.module, group, member))  # type: ignore[method-assign]

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside, layers run as if nothing had been replaced."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules = []

    def _run_layer(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Tensor:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule = member.rule
        x = rule.prepare(args[0] if args else next(iter(kwargs.values())))
        parameters = [getattr(module, name) for name in rule.parameter_names]
        x, parameters = autocast(rule.autocast, x, [None if p is None else p.detach() for p in parameters])
        group_pass = self._flights.pass_of(group, member, x)
        return LayerFunction.apply(group_pass, member, group_pass.probe, x, *parameters)

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
        group_pass = self._flights.pass_of(group, member, x)
        return DirectFunction.apply(group_pass, member, group_pass.probe, x, *parameters)

    def _run_fallback(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Any:
        if self._off or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        call = Call((args, kwargs))
        if not call.values:
            raise UserError(f"Layer {member.name!r} was called without a tensor, so its examples cannot be told apart.")
        kind, parameters = member.rule.autocast, [p.detach() for _, p in module.named_parameters()]
        values = [autocast(kind, v, [])[0] if v.is_floating_point() else v for v in call.values]
        group_pass = self._flights.pass_of(group, member, values[0])
        receive = partial(group_pass.receive, member)
        with torch.autocast(values[0].device.type, enabled=False):
            outputs = FallbackForward.apply(
                member.rule, call, receive, group_pass.probe, len(values), *values, *parameters
            )
        return call.outputs.rebuild(outputs)
