"""Makes the engine's groups from a partition of the layers: which parameters train, where, and with which rule."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import ClipRule, is_async_device
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.partition import Layer, Partition
from groupwise.clipping.rules.base import LayerRule, ParameterRule, Saved, Wanted, total_numel
from groupwise.errors import UserError


@dataclass(frozen=True, eq=False)
class ClippedLayer:
    """A layer inside its group."""

    group: "ClippingGroup"
    name: str
    rule: LayerRule
    parameters: tuple[nn.Parameter | None, ...]
    """The parameters of its rule, in the rule's order; None for one that does not train."""
    rows: tuple[slice | None, ...]
    """For each parameter, the rows that the layer uses; None for all rows."""

    @cached_property
    def wanted(self) -> Wanted:
        """Which of its parameters train."""
        return tuple(parameter is not None for parameter in self.parameters)

    @cached_property
    def label(self) -> str:
        """Its name in error messages."""
        return f"Layer {self.name!r}"


@dataclass
class LayerCall:
    """A call in the backward pass: its rule, its layer, its saved tensors and its output gradients g."""

    rule: LayerRule
    member: ClippedLayer
    saved: Saved
    g: Tensor


@dataclass
class ClippingGroup:
    """A group's constant attributes and its current threshold."""

    index: int
    name: str
    homes: tuple[tuple[nn.Module, str], ...]
    """Its trainable parameters, each as (module, name in the module)."""
    direct: bool
    """Whether layers return their parameters' sums to autograd themselves."""
    clip_rule: ClipRule
    threshold: Tensor
    """C_k, a scalar."""
    members: list[ClippedLayer] = field(default_factory=list)
    together: tuple["ClippingGroup", ...] = ()
    """The groups that are clipped together with it, including itself; () if it is clipped alone."""
    masks: bool = True
    """Whether to set rows of dropped examples to zero without reading whether any are dropped (see `Factors`)."""

    @cached_property
    def most_kept(self) -> int:
        """The number of entries that a layer may keep until the other groups have reported. On a CPU it is small, as
        more would leave the cache."""
        return 1 << 24 if is_async_device(self.threshold) else 1 << 17

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Its trainable parameters as they are now (shards, between two passes under FSDP2)."""
        return tuple(module.get_parameter(name) for module, name in self.homes)


MOST_TOGETHER = 32
"""Groups that close together."""


def _close_together(groups: Sequence[ClippingGroup]) -> None:
    """Let groups that follow each other close together, so that their small operations become one."""
    groups = [g for g in groups if is_async_device(g.threshold) or total_numel(*g.parameters) <= g.most_kept]
    for start in range(0, len(groups), MOST_TOGETHER):
        some = tuple(groups[start : start + MOST_TOGETHER])
        for group in some:
            group.together = some if len(some) > 1 else ()


LEAST = 1e-30
"""The smallest threshold. Entries of sums and noise below 1.2e-38 lose digits, and below 1.4e-45 they are 0."""


def one_each(groups: int, values: float | Sequence[float] | Tensor) -> Tensor:
    """Thresholds (K,), float64 on the CPU, from one for all groups or one each. Raises a `UserError` for another number
    of them, and for one that is not finite, or below `LEAST`."""
    each = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    each = each.expand(groups) if each.dim() == 0 else each
    if each.shape != (groups,):
        raise UserError(f"{tuple(each.shape)} thresholds were given for {groups} groups: give one, or one each.")
    if not all(LEAST <= value < math.inf for value in each.tolist()):
        raise UserError(
            f"Clipping thresholds must be finite and at least {LEAST:g}, as float32 rounds smaller sums and noise "
            f"away; {each.tolist()[:4]} were given, C/sqrt(K) in each of K groups: give a larger threshold."
        )
    return each.clone()


def build_groups(
    layers: tuple[Layer, ...], partition: Partition, clip_rule: ClipRule, methods: NormMethods, direct: bool
) -> tuple[tuple[ClippingGroup, ...], Tensor]:
    """One `ClippingGroup` a group, in order; and the table of their thresholds, (K,), which one copy sets.

    Raises a `UserError` for a layer that cannot be `direct`, or would have to be, and for parameters of several devices
    or dtypes.
    """
    kinds = {(p.device, p.dtype) for layer in layers for p in layer.trainable.values()}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise UserError(f"The trainable parameters are {shown}: move them to one device, and keep one precision.")
    [(device, dtype)] = kinds
    by_name = {layer.name: layer for layer in layers}
    uses = Counter(id(p) for layer in layers for p in layer.trainable.values())
    groups, table = [], torch.ones(len(partition), dtype=dtype, device=device)
    for index, (group, threshold) in enumerate(zip(partition, table.unbind(), strict=True)):
        own = [by_name[name] for name in group.layers]
        homes: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        for layer in own:
            for local, p in layer.trainable.items():
                homes.setdefault(p, (layer.module, local))
        made = ClippingGroup(index, group.name, tuple(homes.values()), direct, clip_rule, threshold)
        own_group = len(own) == 1 and all(uses[id(p)] == 1 for p in homes)
        for layer in own:
            made.members += _members(made, layer, replace(methods, own_group=own_group))
        groups.append(made)
    if direct:
        _check_direct(groups, uses, ghost=methods.save_memory)
    else:
        _check_whole(layers)
        _close_together(groups)
    return tuple(groups), table


def _members(group: ClippingGroup, layer: Layer, methods: NormMethods) -> list[ClippedLayer]:
    """The member for a layer; without a rule, one member for each parameter."""
    if layer.rule is None:
        return [
            ClippedLayer(group, layer.full_name(local), ParameterRule(layer.module, local), (p,), (None,))
            for local, p in layer.trainable.items()
        ]
    rule = layer.rule(layer.module, methods)
    parameters = tuple(layer.trainable.get(local) for local in rule.parameter_names)
    return [ClippedLayer(group, layer.name, rule, parameters, (None,) * len(parameters))]


def _check_direct(groups: Sequence[ClippingGroup], uses: Mapping[int, int], ghost: bool) -> None:
    """Refuse layers that cannot return clipped gradients themselves."""
    for group in groups:
        for member in group.members:
            if isinstance(member.rule, ParameterRule):
                kind = type(member.rule.module).__name__
                raise UserError(
                    f"Parameter {member.name!r} is in a module ({kind}) without a rule, which cannot return gradients "
                    "itself (direct=True): register a rule for it, or freeze it."
                )
            if any(uses[id(p)] > 1 for p in member.parameters if p is not None):
                raise UserError(
                    f"Layer {member.name!r} shares a parameter with another layer, and with direct=True no norm joins "
                    "the two: untie them."
                )
        if len(group.members) > 1 and not ghost:
            raise UserError(
                f"Layer {group.members[0].name!r} shares group {group.name!r} with others, and with direct=True it "
                "returns its gradients before the group's norm is known: use one group a layer, or flat with "
                "norms='ghost'."
            )


def _check_whole(layers: tuple[Layer, ...]) -> None:
    """Refuse sharded parameters: they are whole tensors only while their layer runs, and a group adds to them later."""
    for layer in layers:
        for local, parameter in layer.trainable.items():
            if hasattr(parameter, "placements"):  # a DTensor, without importing torch.distributed
                raise UserError(
                    f"Parameter {layer.full_name(local)!r} is in shards (fully_shard): attach with direct=True."
                )
