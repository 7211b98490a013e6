"""Shards the parameters of a model over the replicas (FSDP2).

The parameters of a block are gathered while it runs. Each replica clips the gradients of its own examples. The clipped
sums are added over the replicas and sharded (reduce-scatter). Each replica adds noise to its own shards, from its own
stream, so the whole gradient gets noise once.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.utils._pytree import tree_map

from groupwise.clipping import ClippingEngine, per_block
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks


def shard(
    model: nn.Module, engine: ClippingEngine | None, clip: ClipConfig, device: torch.device
) -> ClippingEngine | None:
    """Shard `model` over all processes, block by block. Detaches its engine, if there is one, and returns a new one.

    Raises `UserError` if layers share parameters, or groups have several layers and norms are not "ghost".
    """
    from torch.distributed.fsdp import fully_shard  # imported here, because it takes a second

    groups = per_block(model)
    blocks = [group.name for group in groups if all(layer.startswith(f"{group.name}.") for layer in group.layers)]
    if engine is not None:
        engine.detach()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    sum_gradients(model)
    if engine is None:
        return None
    sharded_engine = make_engine(model, clip, direct=True)
    assert sharded_engine is not None
    sharded_engine.plan = engine.plan
    return sharded_engine


def use_shards(model: nn.Module, ranks: Ranks) -> None:
    """Check that the user has sharded a model over all processes in one dimension, and make FSDP2 sum its gradients."""
    if model not in sharded(model):
        raise UserError("Only parts of the model are sharded: call fully_shard on the whole model too, last.")
    for name, parameter in model.named_parameters():
        shard: Any = parameter
        if not hasattr(shard, "to_local") or any(not place.is_shard() for place in shard.placements):
            raise UserError(f"Parameter {name!r} is not sharded: shard all parameters, or none.")
        if (mesh := tuple(shard.device_mesh.shape)) != (ranks.replicas,):
            raise UserError(
                f"Parameter {name!r} is sharded over a mesh of shape {mesh}, but ranks has {ranks.replicas} replicas: "
                "shard over all processes in one dimension."
            )
    for module in sharded(model):
        policy = module._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            raise UserError(
                "The model is sharded with a MixedPrecisionPolicy, which would round clipped sums: leave mp_policy "
                "out, and use torch.autocast for speed."
            )
    sum_gradients(model)


def sum_gradients(model: nn.Module, average: bool = False) -> None:
    """Set FSDP2 to sum gradients over the processes, as the private step needs, or to `average` them, its default."""
    for module in sharded(model):
        module.set_gradient_divide_factor(float(torch.distributed.get_world_size()) if average else 1.0)
        module.set_force_sum_reduction_for_comms(not average)


def are_shards(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether `fully_shard` was called on the model of these parameters."""
    return any(hasattr(parameter, "to_local") for parameter in parameters)


def sharded(model: nn.Module) -> list[Any]:
    """The modules on which `fully_shard` was called, which gave them the methods of `FSDPModule`."""
    return [module for module in model.modules() if hasattr(module, "reshard")]


def reshard(model: nn.Module) -> None:
    """Shard all parameters again. A forward pass without a backward pass leaves the outermost ones gathered."""
    for module in sharded(model):
        module.reshard()


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Gather all sharded tensors of a state, on the CPU. All processes must call this together."""
    return tree_map(lambda value: value.full_tensor().cpu() if hasattr(value, "full_tensor") else value, state)


def in_shards(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard the tensors of the model and of the optimiser in a state that `whole` returned."""
    trainable = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: _like(value, named.get(name)) for name, value in state["model"].items()}
    moments = {
        i: {name: _like(value, trainable[i]) for name, value in entries.items()}
        for i, entries in state["optimizer"]["state"].items()
    }
    return {**state, "model": weights, "optimizer": {**state["optimizer"], "state": moments}}


def _like(value: Any, parameter: nn.Parameter | None) -> Any:
    """This replica's shard of a tensor that has the shape of a sharded parameter; other values as they are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
