"""Finds a model's layers and their rules, and refuses what cannot be clipped, by name."""

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.clipping.rules import REWRITTEN
from groupwise.clipping.rules.base import LayerRule, find_rule
from groupwise.clipping.rules.weights import Forward, forward_of
from groupwise.errors import UserError


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters and how the engine treats it.

    Args:
        name: dotted name in the model ("" for the model itself).
        module: the module.
        rule: its rule class, or None: each of its parameters gets a copy for every example.
        trainable: its own parameters that train, by their name inside the module.
        rewritten: its forward in terms of linear layers and embeddings, for modules that are made of several.
    """

    name: str
    module: nn.Module
    rule: type[LayerRule] | None
    trainable: dict[str, nn.Parameter]
    rewritten: Forward | None = None

    def full_name(self, local: str) -> str:
        """A parameter's name in the whole model."""
        return f"{self.name}.{local}" if self.name else local

    def make_rule(self) -> LayerRule:
        """A rule object for this very layer, which has one.

        Raises:
            UserError: the layer has an option that cannot be clipped.
        """
        assert self.rule is not None
        rule = self.rule(self.module)
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
    layers = []
    for name, module in model.named_modules():
        trainable = {local: p for local, p in module.named_parameters(recurse=False) if p.requires_grad}
        if trainable:
            rule = find_rule(module)
            layers.append(Layer(name, module, rule, trainable, None if rule else forward_of(module, REWRITTEN)))
    if not layers:
        raise UserError("The model has no trainable parameter: set requires_grad=True where it should learn.")
    for layer in layers:
        for local, parameter in layer.trainable.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Parameter {layer.full_name(local)!r} trains in {parameter.dtype}; clipped sums and noise need "
                    "float32: keep trainable parameters in float32 and use autocast for speed."
                )
    return tuple(layers)


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


COPIED = 4096
"""Parameters of fewer numbers cost little where every example has a copy."""


def warn_of_copies(layers: tuple[Layer, ...]) -> None:
    """Say once for which types of modules every example gets a copy of parameters that are not small."""
    kinds = Counter(
        type(layer.module).__name__
        for layer in layers
        if layer.rule is None and layer.rewritten is None and any(p.numel() > COPIED for p in layer.trainable.values())
    )
    if kinds:
        told = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        warnings.warn(
            f"groupwise has no rule for modules of these types: {told}. They are clipped exactly, but where they use "
            "their parameters in other ways than linear layers do, with a gradient for each example in memory.",
            stacklevel=4,
        )
