"""Says how a re-expressed forward uses a module's weights: every product with one goes through a given object.

`recurrent.py`, `attention.py` and `embedding_bag.py` say what a module computes in plain operations, and leave the
uses of its weights to a `Weights`: whoever gives it decides how their gradients are found. Names are the parameters'
names inside the module, dotted for those of its children ("out_proj.weight"). Batch is the first axis of everything.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from groupwise.errors import UserError


class Late(Protocol):
    """The uses of one weight, one in each time step, whose gradient is found for the whole sequence at once.

    Attributes:
        weight, bias: their values, W (p, d) and b (p,) or None.
        added: zeros (B, T, p), whose gradient must become that of the products x Wᵀ + b; None where nothing trains.
    """

    weight: Tensor
    bias: Tensor | None
    added: Tensor | None

    def note(self, x: Tensor) -> None:
        """Keep the inputs of all steps, (B, T, d), for the gradient; once, before the backward pass."""
        ...


class Weights(Protocol):
    """The uses of a module's parameters in one forward pass."""

    def linear(
        self, x: Tensor, weight: str, bias: str | None, rows: slice | None = None, bias_rows: slice | None = None
    ) -> Tensor:
        """x W[rows]ᵀ + b[rows], (B, ..., d) -> (B, ..., p); `bias_rows` where the bias alone is used in part."""
        ...

    def late_linear(self, weight: str, bias: str | None, steps: int, like: Tensor) -> Late:
        """The uses of a weight in `steps` steps, for a batch, dtype and device like those of `like` (B, ...)."""
        ...

    def embedding(self, x: Tensor, weight: str, padding_idx: int | None) -> Tensor:
        """Rows of a table, integers (B, ...) -> (B, ..., d); the row `padding_idx` gets no gradient."""
        ...

    def bags(self, x: Tensor, counts: Tensor | None, weight: str, padding_idx: int | None) -> Tensor:
        """Sums of rows of a table, integers x (B, L) -> (B, d), each times its count (B, L), which gets no gradient;
        without the row `padding_idx`."""
        ...

    def each(self, name: str, batch: int) -> Tensor:
        """A parameter's copies, one for each of the batch's rows: (B, *shape)."""
        ...


Forward = Callable[..., Any]
"""(weights, module, *args, **kwargs) -> what the module's own forward returns."""


def forward_of(module: nn.Module, known: dict[type[nn.Module], Forward]) -> Forward | None:
    """The re-expressed forward of a module, or None: another type, one whose `forward` is its own, computed weights."""
    if any(is_parametrized(part) for part in module.modules()):
        return None
    fits = (kind for kind in known if isinstance(module, kind) and type(module).forward is kind.forward)
    return next((known[kind] for kind in fits), None)


def refuse_unbatched(module: nn.Module, x: Tensor, axes: int) -> None:
    """Refuse an input without a batch.

    Raises:
        UserError: x has another number of axes.
    """
    if x.dim() != axes:
        raise UserError(
            f"{type(module).__name__} got an input of shape {tuple(x.shape)} where {axes} axes were expected, one of "
            "them the batch: add it with unsqueeze, so that there is one loss for each example."
        )
