"""Replaces the `forward` of a model's layers during the engine's passes, and only then.

During a pass, a module that reads a parameter as an attribute gets a `PerExample`. Layers with a rule read theirs from
`_parameters`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

import groupwise.clipping.products  # noqa: F401 (registers the products that need no copies)
from groupwise.clipping.calls import LayerCalls, ParameterUse
from groupwise.clipping.groups import ClippingGroup
from groupwise.clipping.partition import Layer, refuse_batch_statistics
from groupwise.clipping.per_example import PerExample
from groupwise.clipping.rules.base import find_rule
from groupwise.clipping.rules.linear import LinearRule, frozen_linear
from groupwise.clipping.rules.recurrent import is_rewritten, recurrent
from groupwise.errors import UserError


def _is_replaced(module: nn.Module) -> bool:
    """Whether the module has a forward that is not its class's."""
    forward = module.__dict__.get("forward")
    return forward is not None and forward != MethodType(type(module).forward, module)


def _frozen_linear(model: nn.Module) -> Iterator[tuple[nn.Module, LinearRule]]:
    """Linear layers with only frozen parameters, and their rules."""
    for module in model.modules():
        if module._parameters and not _is_replaced(module) and not any(p.requires_grad for p in module.parameters()):
            kind = find_rule(module)
            if kind is not None and issubclass(kind, LinearRule):
                yield module, kind(module)


class Patches:
    """The replacements of an engine: the layers' forwards that clip, and the parameters that modules read.

    A layer whose forward has been replaced by something else is refused here, and BatchNorm in training mode when it
    runs.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        groups: tuple[ClippingGroup, ...],
        calls: LayerCalls,
        direct: bool,
    ) -> None:
        members = {member.name: member for group in groups for member in group.members}
        self._attributes: list[tuple[dict[str, Any], str, Any]] = [
            (module.__dict__, "forward", partial(_run_batch_norm, name, module, module.forward))
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
        ]
        """The replacements: a module's `__dict__`, an attribute's name, and its value during a pass."""
        for module, rule in _frozen_linear(model):
            self._attributes.append((module.__dict__, "forward", partial(frozen_linear, rule)))
        for layer in layers:
            forward: Callable[..., Any] | None = None
            if layer.rule is None and is_rewritten(layer.module) and not direct:
                forward = partial(_run_recurrent, layer.module)
            elif layer.rule is not None:
                if _is_replaced(layer.module):
                    raise UserError(
                        f"Layer {layer.name!r} has had its forward replaced already: remove that wrapper first."
                    )
                forward = partial(calls.layer, layer.module, members[layer.name])
            if forward is not None:
                self._attributes.append((layer.module.__dict__, "forward", torch.compiler.disable(forward)))
        self._hooked = [layer.module.__dict__ for layer in layers if layer.module._forward_pre_hooks]
        """Modules whose hooks may set attributes to a `PerExample`, such as those of `torch.nn.utils.weight_norm`."""
        if direct:
            return
        group_of = {parameter: group for group in groups for parameter in group.parameters}
        copies: dict[nn.Parameter, PerExample] = {}
        for layer in layers:
            for local, parameter in layer.trainable.items():
                if parameter not in copies:
                    use = ParameterUse(calls, group_of[parameter], layer, local)
                    copies[parameter] = PerExample(use.copies, parameter.detach(), use, source=True)
                self._attributes.append((layer.module.__dict__, local, copies[parameter]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the replacements inside; afterwards the model is as before."""
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
            for own in self._hooked:
                own.update({name: value.like.detach() for name, value in own.items() if isinstance(value, PerExample)})


def _run_recurrent(module: Any, *args: Any, **kwargs: Any) -> Any:
    return (recurrent if torch.is_grad_enabled() else type(module).forward)(module, *args, **kwargs)


def _run_batch_norm(name: str, module: _BatchNorm, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    refuse_batch_statistics(name, module)
    with FrozenStatistics():
        return forward(*args, **kwargs)


class FrozenStatistics(TorchFunctionMode):
    """Inside, `F.batch_norm` gets contiguous output gradients, also when the forward of a subclass calls it.

    On a CPU, torch's kernel gives wrong gradients for a single example whose output gradient is transposed in memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.batch_norm and made.grad_fn is not None:  # None: a PerExample, or no gradient at all
            made.register_hook(Tensor.contiguous)
        return made
