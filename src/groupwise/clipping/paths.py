"""Proof that no parameter's gradient bypasses its group's gate."""

from torch import Tensor

from groupwise.clipping.gate import Gate
from groupwise.errors import UserError


def check_paths(losses: Tensor, names: dict[int, str]) -> None:
    """Walk the autograd graph of the losses: only gates may lead to trainable parameters.

    A parameter that a module uses directly (say `F.linear(x, other.weight)`) would get an unclipped gradient on top of
    the clipped sum.

    Args:
        losses: the per-example losses, (B,).
        names: names of the trainable parameters, by id.

    Raises:
        UserError: naming the parameter.
    """
    gate = Gate.__name__ + "Backward"
    seen, stack = set(), [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == gate:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            raise UserError(
                f"Parameter {names[id(variable)]!r} is used outside its own layer's forward, where its gradient cannot "
                "be clipped: call the layer instead, or wrap the computation in a module that owns the parameter."
            )
        stack.extend(next_node for next_node, _ in node.next_functions)
