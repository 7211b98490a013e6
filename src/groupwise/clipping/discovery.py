"""Finding a model's layers and their rules, and refusing what cannot be clipped, by name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList

from groupwise.clipping.costs import Shared
from groupwise.clipping.rules.base import LayerRule, find_rule
from groupwise.clipping.rules.fallback import FallbackRule
from groupwise.errors import UserError


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters and how the engine treats it.

    Args:
        name: dotted name in the model ("" for the model itself).
        module: the module.
        rule: its rule class, or None: the generic fallback, which also owns the parameters of all its children.
        trainable: parameters that train, by their name inside the module.
    """

    name: str
    module: nn.Module
    rule: type[LayerRule] | None
    trainable: dict[str, nn.Parameter]

    def full_name(self, local: str) -> str:
        """A parameter's name in the whole model."""
        return f"{self.name}.{local}" if self.name else local

    def make_rule(self, shared: Shared) -> LayerRule:
        """A rule object for this very layer.

        Raises:
            UserError: the layer has an option that cannot be clipped.
        """
        if self.rule is None:
            names = tuple(name for name, _ in self.module.named_parameters())
            return FallbackRule(self.module, names, self.name or "the model")
        rule = self.rule(self.module, shared)
        reason = rule.refuse()
        if reason:
            raise UserError(f"Layer {self.name!r} ({type(self.module).__name__}) cannot be clipped: {reason}.")
        return rule


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """All layers with trainable parameters, in the model's own order.

    Raises:
        UserError: no trainable parameter; a layer that mixes examples; a trainable parameter in half precision.
    """
    refuse_mixing(model)
    modules = dict(model.named_modules())
    roots: list[str] = []  # modules the fallback takes whole
    found: dict[str, type[LayerRule]] = {}
    for name, module in modules.items():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        rule = find_rule(module)
        if rule is not None:
            found[name] = rule
            continue
        while name and _is_container(modules[name]):
            name = name.rpartition(".")[0]
        roots.append(name)
    roots = [root for root in roots if not any(_below(root, other) for other in roots)]
    found = {name: rule for name, rule in found.items() if not any(_below(name, root) for root in roots)}
    layers = tuple(
        Layer(name, module, found.get(name), dict(_trainable(module, recurse=name not in found)))
        for name, module in modules.items()
        if name in found or name in roots
    )
    if not layers:
        raise UserError("The model has no trainable parameter: set requires_grad=True where it should learn.")
    for layer in layers:
        for local, parameter in layer.trainable.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Parameter {layer.full_name(local)!r} trains in {parameter.dtype}; clipped sums and noise need "
                    "float32: keep trainable parameters in float32 and use autocast for speed."
                )
    return layers


def refuse_mixing(model: nn.Module) -> None:
    """Refuse layers whose output for one example depends on other examples.

    Raises:
        UserError: naming the layer.
    """
    for name, module in model.named_modules():
        running = isinstance(module, _InstanceNorm) and module.track_running_stats
        if running or isinstance(module, _BatchNorm):
            raise UserError(
                f"Layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so no example's influence is "
                "bounded: replace it by GroupNorm or LayerNorm."
            )


def _trainable(module: nn.Module, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module.named_parameters(recurse=recurse) if p.requires_grad)


def _is_container(module: nn.Module) -> bool:
    """Never called with a batch (ParameterList, parametrisations ...): the module above it owns its parameters."""
    return type(module).forward is nn.Module.forward or isinstance(module, ParametrizationList)


def _below(name: str, ancestor: str) -> bool:
    return name != ancestor and (ancestor == "" or name.startswith(ancestor + "."))
