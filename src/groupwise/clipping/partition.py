"""Finds a model's layers, refuses layers that cannot be clipped, and divides the layers into groups.

Every clipping mode is a partition of the layers into groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.clipping.rules import LayerRule, find_rule
from groupwise.errors import UserError


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own, and its rule.

    Args:
        name: dotted name in the model ("" for the model itself).
        rule: its rule class; None: its parameters are clipped by copies, one per example.
        trainable: its own trainable parameters, by their name inside the module.
    """

    name: str
    module: nn.Module
    rule: type[LayerRule] | None
    trainable: dict[str, nn.Parameter]

    def full_name(self, local: str) -> str:
        """A parameter's name in the whole model."""
        return f"{self.name}.{local}" if self.name else local


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """All layers with trainable parameters, in the order of `model.named_modules()`.

    Raises:
        UserError: no trainable parameter; a layer that mixes examples; a trainable parameter in half precision;
            TorchScript.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"Module {name!r}" if name else "The model"
            raise UserError(f"{what} is TorchScript, which hides its layers: use the original module.")
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise UserError(
                f"Layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so no example's influence is "
                "bounded: replace it by one without running statistics (track_running_stats=False)."
            )
        if isinstance(module, _BatchNorm):
            refuse_batch_statistics(name, module)
        trainable = {local: p for local, p in module.named_parameters(recurse=False) if p.requires_grad}
        if trainable:
            layers.append(Layer(name, module, find_rule(module), trainable))
    if not layers:
        raise UserError("The model has no trainable parameter: set requires_grad=True where it should learn.")
    for layer in layers:
        for local, parameter in layer.trainable.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Parameter {layer.full_name(local)!r} trains in {parameter.dtype}, and clipped sums and noise "
                    "need float32: keep trainable parameters in float32 (complex ones as torch.view_as_real has them), "
                    "and use autocast for speed."
                )
    return tuple(layers)


def refuse_batch_statistics(name: str, module: _BatchNorm) -> None:
    """Raise a `UserError` for a BatchNorm that would use the batch's statistics."""
    if module.training or module.running_mean is None:
        keep = ", or call .eval() on it before training (PrivateTrainer: see Modes in docs/integrations.md)"
        raise UserError(
            f"Layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so no example's influence is "
            f"bounded: replace it by GroupNorm (groupwise.fix_model does){'' if module.running_mean is None else keep}."
        )


@dataclass(frozen=True)
class Group:
    """A clipping group k: the layers whose per-example gradients are clipped together.

    Args:
        name: for logs and error messages.
        layers: dotted names of modules, as in `model.named_modules()`.
    """

    name: str
    layers: tuple[str, ...]


Partition = tuple[Group, ...]
"""K groups, in order; each trainable layer is in exactly one."""


def flat(model: nn.Module) -> Partition:
    """One group: the whole model (flat clipping)."""
    return (Group("all", tuple(layer.name for layer in find_layers(model))),)


def per_layer(model: nn.Module) -> Partition:
    """One group per layer, weight and bias together; layers that share a parameter are one group (section 3)."""
    return _group_by(find_layers(model), lambda name: name, merge_shared=True)


def per_block(model: nn.Module) -> Partition:
    """One group per residual or transformer block; every layer outside the blocks is a group of its own.

    Blocks are the members of the outermost `nn.ModuleList` or `nn.Sequential` of which at least two members have more
    than one layer.
    """
    layers = find_layers(model)
    blocks: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_inside(name, block) for block in blocks):
            continue
        members = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
        rich = [member for member in members if sum(_inside(layer.name, member) for layer in layers) > 1]
        if len(rich) >= 2:
            blocks += rich
    return _group_by(
        layers, lambda name: next((block for block in blocks if _inside(name, block)), name), merge_shared=True
    )


def by_mapping(model: nn.Module, mapping: Mapping[str, str]) -> Partition:
    """Any partition, by a mapping from glob patterns of layer names to group names; the first match counts.

    Raises:
        UserError: a layer matches no pattern; a pattern matches no layer; layers that share a parameter are in
            different groups.
    """
    layers = find_layers(model)
    names = [layer.name for layer in layers]
    for pattern, group in mapping.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
            raise UserError(
                f"Pattern {pattern!r} of clipping group {group!r} matches no trainable layer (there are "
                f"{', '.join(map(repr, nearest))}): leave it out, or correct it."
            )

    def group_of(name: str) -> str:
        group = next((group for pattern, group in mapping.items() if fnmatchcase(name, pattern)), None)
        if group is None:
            raise UserError(
                f"Layer {name!r} belongs to no clipping group: add it to the mapping, or freeze its parameters."
            )
        return group

    return _group_by(layers, group_of, merge_shared=False)


def check_partition(layers: tuple[Layer, ...], partition: Partition) -> None:
    """Raise a `UserError` for a partition in which a trainable parameter is in no group, or in more than one."""
    if len({group.name for group in partition}) < len(partition):
        raise UserError("Two clipping groups have the same name: rename one of them.")
    known = {layer.name for layer in layers}
    place: dict[str, str] = {}
    for group in partition:
        for name in group.layers:
            if name not in known:
                raise UserError(
                    f"Group {group.name!r} names layer {name!r}, which has no trainable parameter or is unknown."
                )
            if name in place:
                raise UserError(f"Layer {name!r} is in two groups: {place[name]!r} and {group.name!r}.")
            place[name] = group.name
    first: dict[int, tuple[str, str]] = {}
    for layer in layers:
        if layer.name not in place:
            missing = layer.full_name(next(iter(layer.trainable)))
            raise UserError(
                f"Parameter {missing!r} belongs to no clipping group: add layer {layer.name!r} to one, or freeze it."
            )
        for local, parameter in layer.trainable.items():
            here = (layer.full_name(local), place[layer.name])
            there = first.setdefault(id(parameter), here)
            if there[1] != here[1]:
                raise UserError(
                    f"Parameters {there[0]!r} and {here[0]!r} are one tensor but in two groups, {there[1]!r} and "
                    f"{here[1]!r}: put both layers into the same group, or untie them."
                )


def _inside(name: str, ancestor: str) -> bool:
    return ancestor == "" or name == ancestor or name.startswith(ancestor + ".")


def _group_by(layers: tuple[Layer, ...], group_of: Callable[[str], str], merge_shared: bool) -> Partition:
    """A group for each name that `group_of` gives to layers; groups that share a parameter join the first of them."""
    names = {layer.name: group_of(layer.name) for layer in layers}
    joined: dict[str, str] = {group: group for group in names.values()}
    first_user: dict[int, str] = {}
    for layer in layers if merge_shared else ():
        for parameter in layer.trainable.values():
            user = first_user.setdefault(id(parameter), layer.name)
            one, two = sorted((joined[names[user]], joined[names[layer.name]]), key=list(joined).index)
            if one != two:
                joined = {group: one if into == two else into for group, into in joined.items()}
    groups: dict[str, list[str]] = {}
    for name, group in names.items():
        groups.setdefault(joined[group], []).append(name)
    return tuple(Group(name, tuple(members)) for name, members in groups.items())
