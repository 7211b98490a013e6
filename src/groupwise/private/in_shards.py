"""Takes a model whose parameters are in shards (FSDP2) into a private training, or says why not."""

from __future__ import annotations

from typing import Any

from torch import nn

from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.training.ranks import Alone, Ranks


def in_shards(model: nn.Module) -> bool:
    """Was `fully_shard` called on the model?"""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def prepare_shards(model: nn.Module, clip: ClipConfig, ranks: Alone | Ranks, checked: bool) -> None:
    """Have gradients summed, not averaged, on their way into shards, from now on.

    Args:
        checked: whether the losses of single examples are wanted (`check` of `make_private`).

    Raises:
        UserError: shards whose sums are not those of all processes in the parameters' own precision; clipping that
            needs several layers at once.
    """
    from torch.distributed.fsdp import FSDPModule

    from groupwise.training.shards import sharded, sum_gradients

    if checked:
        raise UserError("check compares with single examples, which need a whole model: verify before fully_shard.")
    if clip.grouping in ("flat", "block") and clip.norms != "ghost":
        raise UserError(
            f"clip={clip.name!r} needs the layers of a group at once, and in shards (FSDP2) each is whole only while "
            "it works: use clip='adaptive_layer', 'fixed_layer' or 'ghost', or replicas without fully_shard."
        )
    if not isinstance(model, FSDPModule):
        raise UserError("Parts of the model are in shards and the whole is not: call fully_shard on the model, last.")
    for name, parameter in model.named_parameters():
        shard: Any = parameter
        if not hasattr(shard, "to_local") or any(not place.is_shard() for place in shard.placements):
            raise UserError(f"Parameter {name!r} is whole in every process: put all parameters into shards, or none.")
        if shard.device_mesh.ndim != 1 or shard.device_mesh.size() != ranks.replicas:
            raise UserError(
                f"Parameter {name!r} is in shards over a mesh of shape {tuple(shard.device_mesh.shape)}, and ranks has "
                f"{ranks.replicas} replicas: shard over all processes in one dimension, and give ranks=Ranks()."
            )
    for module in sharded(model):
        policy: Any = module._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            raise UserError(
                "The shards have a MixedPrecisionPolicy, which would round clipped sums: leave mp_policy out, and use "
                "torch.autocast for speed."
            )
    sum_gradients(model)
