"""Proof that no parameter's gradient bypasses its group's gate."""

from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.functions import CopiesFunction, DirectFunction, LateFunction, LayerFunction
from groupwise.clipping.gate import Gate
from groupwise.clipping.per_example import PerExample
from groupwise.errors import UserError


def check_paths(losses: Tensor, names: dict[int, str], shards: bool = False) -> bool:
    """Walk the autograd graph of the losses: only gates (or layers that clip by themselves) may lead to parameters.

    A parameter that a module uses directly (say `F.linear(x, other.weight)`) would get an unclipped gradient on top of
    the clipped sum.

    Args:
        losses: the per-example losses, (B,), or any other output of the model.
        names: names of the trainable parameters, by id.
        shards: parameters may be shards, and whole tensors that nobody can name while their layer runs.

    Returns:
        Whether an operation on the way may put rows in another order, as a mixture of experts does.

    Raises:
        UserError: naming the parameter; reentrant checkpointing, inside which nothing can be seen.
    """
    reorders = False
    gate, direct = Gate.__name__ + "Backward", DirectFunction.__name__ + "Backward"
    seen: set[Any] = set()
    stack: list[tuple[Any, str]] = [(losses.grad_fn, "the loss")]
    while stack:
        node, after = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.name()
        if kind == gate:
            continue
        if kind == "CheckpointFunctionBackward":
            raise UserError(
                "Reentrant checkpointing runs a part of the model inside the backward pass, where its parameters "
                "cannot be clipped: use checkpointing with use_reentrant=False."
            )
        reorders |= _reorders(node, kind)
        variable = getattr(node, "variable", None)
        if isinstance(variable, PerExample):
            raise UserError(
                f"{variable.origin.label} goes into {after.removesuffix('Backward')}, a torch.autograd.Function, whose "
                "gradient is not told apart by examples: compute the same by plain operations, or freeze it."
            )
        if variable is not None and (id(variable) in names or (shards and isinstance(variable, nn.Parameter))):
            name = names.get(id(variable), f"of shape {tuple(variable.shape)}")
            raise UserError(
                f"Parameter {name!r} is used outside its own layer's forward, where its gradient cannot "
                "be clipped: call the layer instead, or wrap the computation in a module that owns the parameter."
            )
        following = node.next_functions[:2] if kind == direct else node.next_functions  # probe and input
        stack.extend((next_node, kind) for next_node, _ in following)
    return reorders


def layer_nodes(losses: Tensor) -> list[Any]:
    """The nodes in the autograd graph of the losses that say which rows are whose, each with `label` and `order`."""
    kinds = {kind.__name__ + "Backward" for kind in (LayerFunction, LateFunction, CopiesFunction)}
    seen, stack, found = set(), [losses.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in kinds:
            found.append(node)
        stack.extend(following for following, _ in node.next_functions)
    return found


_INDEXED = {"IndexBackward0", "IndexPutBackward0"}
_ON_AN_AXIS = {
    *("IndexSelectBackward0", "GatherBackward0", "ScatterBackward0", "ScatterBackward1", "ScatterAddBackward0"),
    *("ScatterReduceBackward0", "IndexAddBackward0", "IndexCopyBackward0", "SortBackward0", "TopkBackward0"),
    *("FlipBackward0", "RollBackward0"),
}
_ANYWHERE = {"MaskedSelectBackward0", "MaskedScatterBackward0", "TakeBackward0", "PutBackward0"}


def _reorders(node: Any, kind: str) -> bool:
    """Whether an operation may move rows along an axis that may be the batch: one of the first two."""
    if kind in _INDEXED:
        indices = [index for index in node._saved_indices[:2] if index is not None]
        return bool(indices) and not any(map(_counts, indices)) and not _of_copies(node)
    if kind in _ON_AN_AXIS:
        axes = node._saved_dim if hasattr(node, "_saved_dim") else node._saved_dims
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        rank = len(node._input_metadata[0].shape)
        first = {0, 1, -rank, 1 - rank} if rank < 4 else {0, -rank}  # images are rolled along their height, axis 1
        return any((axis - (1 << 64) if axis >= 1 << 63 else axis) in first for axis in axes) and not _of_copies(node)
    return kind in _ANYWHERE and not _of_copies(node)


def _of_copies(node: Any) -> bool:
    """Whether an operation is on parameters' copies and constants alone: their examples are on an axis of vmap's."""
    seen, stack, copies = {node}, [node], CopiesFunction.__name__ + "Backward"
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen or following.name() == copies:
                continue
            if not following.next_functions or len(seen) > 64 or following.name() in _LAYERS:
                return False
            seen.add(following)
            stack.append(following)
    return True


_LAYERS = {kind.__name__ + "Backward" for kind in (LayerFunction, LateFunction, DirectFunction)}


def _counts(index: Tensor) -> bool:
    """Whether an index is 0, 1, 2, ...: rows stay where they are."""
    flat = index.flatten()
    return len(flat) == len(index) and torch.equal(flat, torch.arange(len(flat), device=flat.device))
