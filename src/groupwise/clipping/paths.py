"""Proof that no parameter's gradient bypasses its group's gate."""

from typing import Any

from torch import Tensor, nn

from groupwise.clipping.gate import DirectFunction, Gate, LateFunction, LayerFunction
from groupwise.clipping.per_example import Meeting, PerExample
from groupwise.errors import UserError


def check_paths(losses: Tensor, names: dict[int, str], shards: bool = False) -> None:
    """Walk the autograd graph of the losses: only gates (or layers that clip by themselves) may lead to parameters.

    A parameter that a module uses directly (say `F.linear(x, other.weight)`) would get an unclipped gradient on top of
    the clipped sum.

    Args:
        losses: the per-example losses, (B,), or any other output of the model.
        names: names of the trainable parameters, by id.
        shards: parameters may be shards, and whole tensors that nobody can name while their layer runs.

    Raises:
        UserError: naming the parameter.
    """
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


def layer_nodes(losses: Tensor) -> list[Any]:
    """The nodes in the autograd graph of the losses that say which rows are whose, each with `label` and `order`."""
    kinds = {kind.__name__ + "Backward" for kind in (LayerFunction, LateFunction, Meeting)}
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
