"""Says what a layer rule must give the engine, what it may use, and finds the rule of a module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from groupwise.clipping.cost_model import Choices, LastProducts, OuterProducts
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.precision import sum_of_squares
from groupwise.errors import UserError


class BufferPool:
    """One buffer for each purpose, which the layers of a backward pass take over from each other.

    A buffer grows to the largest size that was asked for. On a CPU fresh memory is mapped page by page as it is first
    written, which can cost more than the arithmetic on it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, purpose: str, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised memory of a shape, with dtype and device of `like`, until the purpose is asked for again.

        Other devices than a CPU get fresh memory: their allocators keep it, and know about streams.
        """
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = 1
        for length in shape:
            size *= length
        key = (purpose, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = like.new_empty(size)
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


@dataclass(frozen=True)
class RuleContext:
    """What the rule of one layer works with; `RuleContext()` will do for a call outside of an engine."""

    own_group: bool = False
    """The layer is a group by itself, and each of its parameters is used once: clipped sums are fused with norms."""
    save_memory: bool = False
    """Nothing may be kept for the sake of speed (ghost clipping)."""
    choices: Choices = field(default_factory=Choices)
    """How the layer's norms are computed, decided once for each size."""
    buffers: BufferPool = field(default_factory=BufferPool)
    products: LastProducts = field(default_factory=LastProducts)

    def for_layer(self, own_group: bool = False) -> "RuleContext":
        """The context of another layer of the same engine: choices of its own, everything else shared."""
        return replace(self, own_group=own_group, choices=Choices(self.choices.formula, self.choices.rates))

    def clear(self) -> None:
        """Give back what a backward pass has left behind."""
        self.buffers.clear()
        self.products.clear()


@lru_cache
def device_memory(kind: str, index: int) -> int:
    """Bytes that a device has; 16 GiB where it cannot be asked."""
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(index).total_memory)
    return 1 << 34


def chunk_floats(like: Tensor) -> int:
    """Numbers that a chunk of materialised gradients may hold: about a core's cache, or a 64th of a GPU's memory."""
    device = like.device
    return 1 << 20 if device.type == "cpu" else device_memory(device.type, device.index or 0) // 256


MOST_KEPT = 1 << 24
"""Numbers that a layer may keep until the groups that close with its own are there."""
MOST_KEPT_WARM = 1 << 17
"""The same on a CPU, whose caches are cold for more by then; a layer of so few costs more to begin than to compute."""

Saved = tuple[Tensor | None, ...]
Wanted = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]
Clip = Callable[[Tensor], Tensor]
"""squared norms (n,) of the next n examples -> their factors (n,)."""
Finish = Callable[[Tensor], Gradients]
"""factors (B,) -> Σ_i factor_i · g_k^(i) for each parameter."""


@dataclass(frozen=True)
class IndexedSum:
    """A weighted sum that has numbers in few rows of its parameter: as a whole, or to be added to another use's sum."""

    whole: Finish
    rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    """factors (B,) -> indices (n,) and what is added there, (n, d); an index may come several times."""

    def __call__(self, factors: Tensor) -> Gradients:
        return self.whole(factors)


class LayerRule(ABC):
    """What the engine must know of one type of layer.

    Three methods are the mathematics and have no default: `forward`, `input_gradient`, `per_example_gradients`; with
    `PerExampleRule` nothing else is needed. For layers whose weight gradient is a product of matrices see `MatrixRule`.
    """

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
    claims: ClassVar[str] = ""
    """A module inside of the layer whose parameters are the layer's own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        """Whether this rule is right for the module: subclasses count only if they left `forward` alone."""
        return isinstance(module, cls.layer_type) and type(module).forward is cls.layer_type.forward

    def values(self) -> list[Tensor | None]:
        """The parameters' values, in the order of their names."""
        return [self.module._parameters.get(name) for name in self.parameter_names]

    def refuse(self) -> str | None:
        """Why this very layer cannot be clipped (an option that mixes examples, say), or None."""
        return None

    def has_batch(self, axes: int) -> bool:
        """Whether the first of so many axes of the module's own input is a batch: an example may have one to itself."""
        return False

    # -- the forward pass -----------------------------------------------------------------------------------------

    def prepare(self, x: Tensor) -> Tensor:
        """What happens to the input outside the rule, by ordinary autograd (unusual paddings, say)."""
        return x

    @abstractmethod
    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """The layer's output and what its backward needs, in a tuple whose positions mean the same at every call."""

    def keep(self, saved: Saved, context: RuleContext) -> Saved:
        """What of `saved` is worth its memory until the backward pass; None in the place of the rest."""
        return saved

    # -- the backward pass ----------------------------------------------------------------------------------------

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        """The output gradient in the memory layout that the rest works on."""
        return g

    @abstractmethod
    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """Gradient for the input, of its shape; None where inputs have none (embedding)."""

    def begin_backward(self, saved: Saved, g: Tensor, needs_input: bool) -> tuple[Tensor | None, Saved]:
        """The input gradient, where it is needed, and what the rest of the backward pass gets in the place of `saved`:
        a rule whose kernel finds more on its way than the input gradient keeps that."""
        return self.input_gradient(saved, g) if needs_input else None, saved

    @abstractmethod
    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """Each wanted parameter's per-example gradients (B, *shape), float32 or better; None for the others."""

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """‖g_k^(i)‖² over the wanted parameters, (B,), float64, never under-stated by rounding."""
        return sum_of_squares(self.per_example_gradients(saved, g, wanted))

    def norm_terms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Terms | Tensor:
        """The same, or what they are made of, to be finished with those of other layers."""
        return self.squared_norms(saved, g, wanted, context)

    def defers(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> bool:
        """Whether the sums of a layer in a group of its own may wait for other groups, without more work or memory
        than `MOST_KEPT`."""
        return numbers(*saved, g) <= (MOST_KEPT_WARM if g.device.type == "cpu" else MOST_KEPT)

    @abstractmethod
    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        """Σ_i factor_i · g_k^(i) for each parameter (None: all ones); examples with factor 0 are left out."""

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted, context: RuleContext) -> Gradients:
        """Norms, factors and weighted sum in one go; rules that materialise gradients anyway fuse it."""
        return self.weighted_sum(saved, g, clip(self.squared_norms(saved, g, wanted, context)), wanted, context)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> tuple[Terms | Tensor, Finish]:
        """Squared norms now, (B,) or their terms, and what makes the weighted sum once factors are known."""
        finish = partial(self.weighted_sum, saved, g, wanted=wanted, context=context)
        return self.norm_terms(saved, g, wanted, context), finish

    def book_keep_all(
        self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext
    ) -> list[tuple[Terms | Tensor, Finish]]:
        """The same in as many parts as come cheapest, whose squares and sums add up."""
        return [self.book_keep(saved, g, wanted, context)]

    # -- parameters that are used more than once ------------------------------------------------------------------

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        return tuple(t[rows] if i in self.batched and t is not None else t for i, t in enumerate(saved)), g[rows]

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Several calls of the layer as one whose gradients are the sums of theirs."""
        raise UserError(f"{type(self).__name__} says that its calls stack, but not how: give it `stack`.")

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts | None:
        """The first parameter's gradients as sums of outer products, in the order of its axes; None: not of that kind.

        Two uses of a parameter that both have them get their inner product from them; others are materialised.
        """
        return None


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
    if is_parametrized(module, name):
        return True
    return name not in module._parameters and getattr(module, name, None) is not None


def numbers(*tensors: object) -> int:
    """How many numbers these tensors hold together; what is no tensor holds none."""
    count = 0
    for t in tensors:
        if isinstance(t, Tensor):
            count += t.numel()
    return count


def in_format_of(x: Tensor, g: Tensor) -> Tensor:
    """g in the memory format of x, contiguous or channels_last: kernels read the two side by side."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return g.contiguous(memory_format=torch.channels_last) if last else g.contiguous()
