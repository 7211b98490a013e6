"""Proves at every step that nothing bypasses clipping, and that every layer and parameter takes part and is the same.

A parameter's gradient may come from its group (or from a layer that clips by itself) and from nowhere else.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from groupwise.clipping.autograd import CopiesFunction, DirectFunction, GroupFunction, LateFunction, LayerFunction
from groupwise.clipping.cost_model import Formula
from groupwise.clipping.example_by_example import ALONE
from groupwise.clipping.groups import ClippingGroup
from groupwise.clipping.microbatches import BackwardPass
from groupwise.clipping.partition import Partition
from groupwise.clipping.per_example import PerExample
from groupwise.errors import UserError


def check_options(norms: str, partition: Partition, formula: str, batch_axis: int, direct: bool) -> None:
    """Refuse options that are unknown, or do not go together.

    Raises:
        UserError: naming the option.
    """
    if norms not in ("bookkeeping", "ghost"):
        raise UserError(f"norms={norms!r} is unknown: choose 'bookkeeping' or 'ghost'.")
    if norms == "ghost" and len(partition) != 1:
        raise UserError(
            f"Ghost clipping has one factor an example, so it needs one group; {len(partition)} were given."
        )
    if formula not in get_args(Formula):
        raise UserError(f"formula={formula!r} is unknown: choose 'auto', 'gram' or 'materialize'.")
    if batch_axis not in (0, 1):
        raise UserError(f"batch_axis={batch_axis!r} is unknown: 0, or 1 where sequences come first.")
    if batch_axis and direct:
        raise UserError("batch_axis=1 is not for direct=True (FSDP), which takes the first axis: put the batch first.")


def check_losses(losses: Tensor) -> None:
    """Refuse losses that are not one number for each example.

    Raises:
        UserError: another shape, whole numbers, no gradient, or what holds no batch.
    """
    if losses.dim() != 1 or not losses.is_floating_point():
        raise UserError(
            f"The loss must be one value per example, a float tensor of shape (batch,); {tuple(losses.shape)} was "
            "given: use reduction='none' and reduce over everything but the batch."
        )
    if isinstance(losses, PerExample):
        raise UserError(
            f"The losses hold no batch (they come from {losses.origin.label[0].lower()}{losses.origin.label[1:]}): "
            "the batch must be the first axis of the model's first input, or give batch_axis=1 if it is the second."
        )
    if not losses.requires_grad:
        raise UserError("The losses carry no gradient: compute them with gradients on, from the attached model.")


class Attached:
    """The parameters of a model as they were when an engine was attached.

    Args:
        model: whose layers' forwards are replaced.
        shards: parameters are swapped between shards and whole tensors (FSDP2), so only whether they train is known.
    """

    def __init__(self, model: nn.Module, shards: bool) -> None:
        self._model, self._shards = model, shards
        self._known = {name: (p, p.requires_grad, p.shape, p.dtype) for name, p in model.named_parameters()}

    def check_same(self) -> None:
        """Refuse a parameter that was added, taken away, replaced, frozen, thawed, or got another shape or dtype.

        Raises:
            UserError: naming the parameter.
        """
        seen = 0
        for name, parameter in self._model.named_parameters():
            known = self._known.get(name)
            if known is None:
                _refuse(name, "added or replaced")
            before, trained, shape, dtype = known
            seen += 1
            if parameter.requires_grad != trained:
                _refuse(name, "thawed" if parameter.requires_grad else "frozen")
            if not trained or self._shards:
                continue
            if parameter is not before:
                _refuse(name, "replaced by another tensor", " (to change its values, copy them into it)")
            if parameter.shape != shape or parameter.dtype != dtype:
                _refuse(name, f"made {parameter.dtype} of shape {tuple(parameter.shape)}")
        if seen < len(self._known):
            there = dict(self._model.named_parameters())
            _refuse(next(name for name in self._known if name not in there), "taken out of the model, or tied,")

    def check_gradients(self) -> None:
        """Refuse a parameter that trains and has no gradient.

        Raises:
            UserError: naming the parameter.
        """
        if self._shards:  # they may get their gradients later
            return
        for name, (parameter, trained, _, _) in self._known.items():
            if trained and parameter.grad is None:
                raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")


def check_groups(groups: Sequence[ClippingGroup], current: BackwardPass, direct: bool) -> None:
    """Refuse a group of which no layer took part; with `direct`, whose layers report themselves, a single layer.

    Raises:
        UserError: naming the group or the layer, and a parameter of it; a second pass on other numbers than the first.
    """
    for group_pass in current.passes.values():
        group_pass.recomputed.check()
    for group in groups:
        silent = [member for member in group.members if member.name not in current.reported] if direct else []
        if group.index not in current.closed or silent:
            member = silent[0] if silent else group.members[0]
            what = f"layer {member.name!r}" if silent else f"layer of group {group.name!r}"
            name = group.names[next(place for place in member.places if place is not None)]
            raise UserError(
                f"The losses reach no {what} (parameter {name!r} and the like): freeze its parameters, or use them in "
                "every forward pass (times 0, where they shall do nothing)."
            )


def _refuse(name: str, done: str, remedy: str = "") -> NoReturn:
    raise UserError(f"Parameter {name!r} was {done} after attaching: detach(), then attach again{remedy}.")


def check_paths(losses: Tensor, names: dict[int, str], shards: bool = False) -> bool:
    """Walk the autograd graph of the losses: only groups, or layers that clip by themselves, may lead to parameters.

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
    group, direct = GroupFunction.__name__ + "Backward", DirectFunction.__name__ + "Backward"
    seen: set[Any] = set()
    stack: list[tuple[Any, str]] = [(losses.grad_fn, "the loss")]
    while stack:
        node, after = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.name()
        if kind == group and node._forward_cls is GroupFunction:
            continue
        if kind == "CheckpointFunctionBackward":
            raise UserError(
                "Reentrant checkpointing runs a part of the model inside the backward pass, where its parameters "
                "cannot be clipped: use checkpointing with use_reentrant=False."
            )
        reorders |= _reorders(node, kind, losses.shape[0] if losses.dim() else 1)
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
                "be clipped: call the layer instead, or wrap the computation in a module that owns the parameter; for "
                "a penalty on weights use the optimizer's weight_decay."
            )
        if isinstance(variable, nn.Parameter):
            raise UserError(
                f"The losses use a trainable parameter of shape {tuple(variable.shape)} that is not the model's, whose "
                "gradient nobody clips: make it part of the model before attaching, or freeze it."
            )
        ours = kind == direct and node._forward_cls is DirectFunction
        following = node.next_functions[:2] if ours else node.next_functions  # probe and input
        stack.extend((next_node, kind) for next_node, _ in following)
    return reorders


def layer_nodes(losses: Tensor) -> list[Any]:
    """The nodes in the autograd graph of the losses that say which rows are whose, each with `member` and `layout`."""
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
    *("FlipBackward0", "RollBackward0", "SegmentReduceBackward0"),
}
_ANYWHERE = {"MaskedSelectBackward0", "MaskedScatterBackward0", "TakeBackward0", "PutBackward0", "EmbeddingBackward0"}
_MOVING = _INDEXED | _ON_AN_AXIS | _ANYWHERE


def _reorders(node: Any, kind: str, batch: int) -> bool:
    """Whether an operation may move rows along an axis that may be the batch: one of the first two."""
    if kind not in _MOVING or ALONE in node.metadata:  # asked before indices, which are looked at on the device
        return False
    if kind in _INDEXED:
        return _moves(node, batch)
    if kind in _ANYWHERE:
        return True
    axes = next(getattr(node, name) for name in ("_saved_dim", "_saved_dims", "_saved_axis") if hasattr(node, name))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    rank = len(node._input_metadata[0].shape)
    first = {0, 1, -rank, 1 - rank} if rank < 4 else {0, -rank}  # images are rolled along their height, axis 1
    return not axes or any((axis - (1 << 64) if axis >= 1 << 63 else axis) in first for axis in axes)


def _moves(node: Any, batch: int) -> bool:
    """Whether indices move rows: on the first axis, or on a second one that the batch may be on."""
    shape = node._saved_self_sym_sizes if hasattr(node, "_saved_self_sym_sizes") else node._input_metadata[0].shape
    indices = dict(enumerate(node._saved_indices[:2]))
    given = [axis for axis, index in indices.items() if index is not None]
    still = {axis for axis in given if _counts(indices[axis])}
    if len(given) == 2 and indices[0].shape == indices[1].shape and list(shape[:2]) != [batch, batch]:
        return 0 not in still and (shape[0] % batch == 0 or 1 not in still)  # rows of pairs: (i, what is picked there)
    return any(axis not in still and (axis == 0 or shape[axis] % batch == 0) for axis in given)


def _counts(index: Tensor) -> bool:
    """Whether an index is 0, 1, 2, ...: rows stay where they are."""
    flat = index.flatten()
    along = max(index.shape, default=0)
    return len(flat) == along and torch.equal(flat, torch.arange(along, device=flat.device))
