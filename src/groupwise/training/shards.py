"""Trains replicas that share one copy of the parameters between them, in shards (FSDP2).

Every block is gathered for as long as it works, clips on each replica the gradients of its own examples, and goes back
into shards; the clipped sums are added up over the replicas on their way there. A replica adds noise to its own shards
from a stream of its own, so that together they add one noise to the whole gradient.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.clipping import ClippingEngine, per_block
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.training.from_config import make_engine
from groupwise.training.step import Trainer
from groupwise.training.task import Split


def shard(
    model: nn.Module, engine: ClippingEngine | None, clip: ClipConfig, device: torch.device
) -> ClippingEngine | None:
    """Shard `model` over all processes, block by block, and attach clipping again; `engine` is detached.

    Returns:
        The engine of the sharded model; None where there was none.

    Raises:
        UserError: layers that share parameters or have no rule, or groups of several layers that are not ghost's.
    """
    blocks = [group.name for group in per_block(model) if all(_inside(layer, group.name) for layer in group.layers)]
    if engine is not None:
        _check(engine)
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


def sum_gradients(model: nn.Module) -> Callable[[], None]:
    """Have the shards' gradients summed over the processes: the private release divides by the expected batch size.

    Returns:
        What has them made again as they were before.
    """
    names = ("gradient_divide_factor", "force_sum_reduction_for_comms")
    states: list[Any] = [module._get_fsdp_state() for module in sharded(model)]
    held = [getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]) for state in states]
    groups = [group for some in held for group in some if group is not None]
    before = [[getattr(group, name) for name in names] for group in groups]
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def undo() -> None:
        for group, values in zip(groups, before, strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(group, name, value)

    return undo


def _inside(layer: str, block: str) -> bool:
    return layer.startswith(f"{block}.")


def _check(engine: ClippingEngine) -> None:
    """Refuse what a layer that is whole only while it works cannot clip, in the words of the configuration."""
    for group in engine.groups:
        uses = Counter(place for member in group.members for place in member.places if place is not None)
        tied = [member.name for member in group.members if any(uses[p] > 1 for p in member.places if p is not None)]
        if tied:
            raise UserError(
                f"Layer {tied[0]!r} shares a parameter with another, which parallel.kind=fsdp cannot clip: untie them "
                "(model.untie=true for the head of a language model), or use parallel.kind=ddp."
            )
        if len(group.members) > 1 and engine.norms != "ghost":
            raise UserError(
                f"Group {group.name!r} has several layers, and with parallel.kind=fsdp none is whole for long enough "
                "to wait for the others: use clip=adaptive_layer, fixed_layer or ghost, or parallel.kind=ddp."
            )


class ShardedTrainer(Trainer):
    """A `Trainer` of a model that `shard` has sharded.

    Evaluation and checkpoints gather parameters from all replicas.
    """

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """The task's own metrics, which the replicas work out together, all of them on the same examples."""
        found = super().evaluate(split, batch_size, limit, final)
        reshard(self.task.model)
        return found

    def state_dict(self) -> dict[str, Any]:
        """As `Trainer.state_dict`, every tensor whole and on the CPU."""
        return whole_state(super().state_dict())

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go back to where `state_dict` was taken; every replica has the whole of it."""
        super().load_state_dict(state_in_shards(state, self.task.model, self.private.trainable), step)

    def _check_update(self, step: int) -> None:
        """Nothing: what the task remembers are parameters from before they were sharded."""

    def _model_state(self) -> dict[str, Any]:
        return whole_state(super()._model_state())


def sharded(model: nn.Module) -> list[FSDPModule]:
    """The modules that `fully_shard` was called on."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards: a forward pass without a backward leaves the outermost ones whole."""
    for module in sharded(model):
        module.reshard()


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state with every tensor whole and on the CPU; every process asks at the same time."""
    return _mapped(state, _whole)


def state_in_shards(state: dict[str, Any], model: nn.Module, trainable: Sequence[nn.Parameter]) -> dict[str, Any]:
    """What `whole_state` made, with each tensor of the model's and the optimiser's cut as its parameter is.

    Args:
        trainable: the parameters that the optimiser moves, in its order.
    """
    places = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: _like(value, places.get(name)) for name, value in state["model"].items()}
    moments = {
        i: {name: _like(value, trainable[i]) for name, value in entries.items()}
        for i, entries in state["optimizer"]["state"].items()
    }
    return {**state, "model": weights, "optimizer": {**state["optimizer"], "state": moments}}


def _whole(tensor: Tensor) -> Tensor:
    """A tensor from all its shards; every replica asks for the same ones in the same order."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def _like(value: Any, parameter: nn.Parameter | None) -> Any:
    """This replica's shard of a whole tensor, where it belongs to a parameter in shards."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        whole = value.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dicts and lists with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_mapped(part, change) for part in value]
    return value
