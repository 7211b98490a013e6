"""The contract of a layer rule, and the registry that finds the rule of a layer.

A rule is stateless mathematics on (saved tensors, output gradient) of one call of one layer. Batch is the first axis
of everything. `wanted` tells which of the layer's parameters train, in the order of `parameter_names`: only these
count in norms and sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from groupwise.clipping.costs import Choices, Shared
from groupwise.clipping.squared_norms import squared_row_norms
from groupwise.errors import UserError

Saved = tuple[Tensor | None, ...]
Wanted = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]
Clip = Callable[[Tensor], Tensor]
"""squared norms (n,) of the next n examples -> their factors (n,)."""
Finish = Callable[[Tensor], Gradients]
"""factors (B,) -> Σ_i factor_i · g_k^(i) for each parameter."""


class LayerRule(ABC):
    """What the engine must know of one type of layer. One file a rule; adding a layer is adding a file."""

    layer_type: ClassVar[type[nn.Module]]
    parameter_names: ClassVar[tuple[str, ...]]
    autocast: ClassVar[Literal["lower", "float32", "keep"]] = "lower"
    """What torch.autocast does to this layer's inputs: lower precision, float32, or nothing."""

    batched: ClassVar[tuple[int, ...]] = (0,)
    """Which of the saved tensors have the batch as their first axis."""
    features_last: ClassVar[bool] = False
    """Whether the layer works on the last axis alone, so that all others may come in any order and number."""
    stacks: ClassVar[bool] = False
    """Whether several calls can become one (`stack`)."""
    alone = False
    """Whether the engine gave the layer a group of its own: clipped sums can then be fused with the norms."""
    thrifty = False
    """Whether nothing may be kept for the sake of speed: set for ghost clipping, which is there to save memory."""

    def __init__(self, module: nn.Module, shared: Shared | None = None) -> None:
        self.module = module
        self.shared = shared or Shared()
        self.choices = Choices(self.shared)

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        """Whether this rule is right for the module: subclasses count only if they left `forward` alone."""
        return isinstance(module, cls.layer_type) and type(module).forward is cls.layer_type.forward

    def refuse(self) -> str | None:
        """Why this very layer cannot be clipped (an option that mixes examples, say), or None."""
        return None

    def prepare(self, x: Tensor) -> Tensor:
        """What happens to the input outside the rule, by ordinary autograd (unusual paddings, say)."""
        return x

    @abstractmethod
    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """The layer's output and what its backward needs."""

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        """The output gradient in the memory layout that the rest works on."""
        return g

    @abstractmethod
    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """Gradient for the input; None where inputs have none (embedding)."""

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        return tuple(t[rows] if i in self.batched and t is not None else t for i, t in enumerate(saved)), g[rows]

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Several calls of the layer as one whose gradients are the sums of theirs."""
        raise UserError(f"{type(self).__name__} says that its calls stack, but not how: give it `stack`.")

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """‖g_k^(i)‖² over the wanted parameters, (B,), float64."""
        return sum_of_squares(self.per_example_gradients(saved, g, wanted))

    @abstractmethod
    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        """Σ_i factor_i · g_k^(i) for each parameter (None: all ones); examples with factor 0 are left out."""

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        """Norms, factors and weighted sum in one go; rules that materialise gradients anyway fuse it."""
        return self.weighted_sum(saved, g, clip(self.squared_norms(saved, g, wanted)), wanted)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted) -> tuple[Tensor, Finish]:
        """Squared norms now, (B,), and what makes the weighted sum when the group's factors are known."""
        return self.squared_norms(saved, g, wanted), partial(self.weighted_sum, saved, g, wanted=wanted)

    @abstractmethod
    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """Each parameter's per-example gradients (B, *shape), for parameters that several layers share."""


_RULES: list[type[LayerRule]] = []


def register_rule(rule: type[LayerRule]) -> type[LayerRule]:
    """Class decorator: make a rule known. Later registrations win, so a user's rule can replace a built-in one."""
    _RULES.insert(0, rule)
    return rule


def find_rule(module: nn.Module) -> type[LayerRule] | None:
    """The rule for a module, or None where its parameters get a copy for each example."""
    own = set(module._parameters)
    for rule in _RULES:
        if rule.handles(module) and own <= set(rule.parameter_names):
            # A weight that is computed is no parameter. It is not looked at: computing it may change buffers.
            return None if any(_is_computed(module, name) for name in rule.parameter_names) else rule
    return None


def _is_computed(module: nn.Module, name: str) -> bool:
    return is_parametrized(module, name) or (name not in module._parameters and module.__dict__.get(name) is not None)


def sum_of_squares(gradients: Gradients) -> Tensor:
    """‖g^(i)‖² over all parameters, (B,), from their per-example gradients (B, *shape); None where not wanted."""
    return torch.stack([squared_row_norms(rows) for rows in gradients if rows is not None]).sum(0)


def rounding_slack(absolute: Tensor, terms: int, dtype: torch.dtype | None = None) -> Tensor:
    """How far rounding may have pushed down a sum of products whose absolute values add up to `absolute`.

    Squared norms that come out of cancelling terms (Gram matrices, closed forms, cross terms) are raised by this much,
    so that no norm is under-stated: 4·√n·eps, for inner products of n terms, holds with high probability (Higham and
    Mary 2019) where roundings are independent, and, as `inner_products` adds up a few terms at a time, by measurement
    where they are not: all terms equal. Where nothing cancels it is a relative 1e-5 or less in float32.
    `dtype` is what the sum was computed in, if that is not the type of `absolute`.
    """
    return absolute * (4 * terms**0.5 * torch.finfo(dtype or absolute.dtype).eps)


def second_product_slack(x: Tensor, g: Tensor, terms: int) -> Tensor:
    """What the square of a materialised norm is raised by, (B,), where the clipped sum is made by another product.

    x and g (B, ...) are the two sides of one example's gradient, a sum of `terms` outer products. The second product
    rounds otherwise than the first, by up to 4·√n·eps·‖x‖‖g‖: nothing, unless the outer products cancel almost wholly.
    """
    return squared_row_norms(x) * squared_row_norms(g) * (16 * terms * torch.finfo(g.dtype).eps ** 2)


def chunk_floats(like: Tensor) -> int:
    """Numbers that a chunk of materialised gradients may hold: about a core's cache, or enough to fill a GPU."""
    return 1 << 20 if like.device.type == "cpu" else 1 << 26


def numbers(*tensors: object) -> int:
    """How many numbers these tensors hold together; what is no tensor holds none."""
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def in_format_of(x: Tensor, g: Tensor) -> Tensor:
    """g in the memory format of x, contiguous or channels_last: kernels read the two side by side."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return g.contiguous(memory_format=torch.channels_last) if last else g.contiguous()


def upcast(t: Tensor) -> Tensor:
    """Half precision becomes float32; everything else stays: norms and sums are float32 or better."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
