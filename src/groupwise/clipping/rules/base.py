"""Says what a layer rule must give the engine, what it may use, and finds the rule of a module.

A rule needs three methods: `forward`, `input_gradient` and `per_example_gradients`. Norms and sums follow from them.
Where they can be had without a gradient for each example, a rule has `squared_norms` and `weighted_sum` of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from groupwise.clipping.clip_plan import Layout, Order
from groupwise.clipping.factors import Factors, add_weighed_rows, without_rows
from groupwise.clipping.gram import OuterProducts
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.precision import sum_of_squares, upcast
from groupwise.errors import UserError

Saved = tuple[Any, ...]
"""Tensors, or None, that a rule keeps from a call's forward pass."""
Wanted = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]
Clip = Callable[[Tensor], Factors]
"""squared norms (n,) of the next n examples -> their factors."""


class LayerRule(ABC):
    """What the engine must know of one type of layer."""

    layer_type: ClassVar[type[nn.Module] | tuple[type[nn.Module], ...]]
    parameter_names: ClassVar[tuple[str, ...]]
    autocast: ClassVar[Literal["lower", "float32", "keep"]] = "lower"
    """What torch.autocast does to this layer's inputs: lower precision, float32, or nothing."""
    batched: ClassVar[tuple[int, ...]] = (0,)
    """Which of the saved tensors have the batch as their first axis."""
    features_last: ClassVar[bool] = False
    """Whether the layer works on the last axis alone, so that all others may come in any order and number."""
    stacks: ClassVar[bool] = False
    """Whether it has `rows`, so that several calls can become one."""
    indexed: ClassVar[bool] = False
    """Whether sums are numbers in few rows of the parameter, and it has `weighted_rows`."""

    def __init__(self, module: nn.Module, methods: NormMethods | None = None) -> None:
        self.module = module
        self.methods = NormMethods() if methods is None else methods
        """How the layer's norms are computed, decided once for each size."""
        self._numel: dict[Wanted, int] = {}

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        """Whether this rule is right for the module: subclasses count only if they left `forward` alone."""
        kinds = cls.layer_type if isinstance(cls.layer_type, tuple) else (cls.layer_type,)
        return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)

    def values(self) -> list[Any]:
        """The parameters' values, in the order of their names."""
        return [self.module._parameters.get(name) for name in self.parameter_names]

    def has_batch(self, axes: int) -> bool:
        """Whether the first of so many axes of the module's own input is a batch: an example may have one to itself."""
        return False

    # -- the forward pass -----------------------------------------------------------------------------------------

    def prepare(self, x: Tensor) -> Tensor:
        """What happens to the input outside the rule, by ordinary autograd (unusual paddings, say)."""
        return x

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        """The layer's output and what its backward needs, in a tuple whose positions mean the same at every call."""
        raise UserError(f"{type(self).__name__} has no forward: a rule of a layer needs one.")

    # -- the backward pass ----------------------------------------------------------------------------------------

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        """The output gradient in the memory layout that the rest works on."""
        return g.contiguous() if self.features_last or not saved else in_format_of(saved[0], g)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """Gradient for the input, of its shape; None where inputs have none (embedding)."""
        raise UserError(f"{type(self).__name__} has no input_gradient: a rule of a layer needs one.")

    def begin_backward(self, saved: Saved, g: Tensor, needs_input: bool) -> tuple[Tensor | None, Saved]:
        """The input gradient, where it is needed, and what the rest of the backward pass gets in the place of `saved`:
        a rule whose kernel finds more on its way than the input gradient keeps that."""
        return self.input_gradient(saved, g) if needs_input else None, saved

    @abstractmethod
    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """Each wanted parameter's per-example gradients (B, *shape), float32 or better; None for the others."""

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Terms | Tensor | None:
        """‖g_k^(i)‖² over the wanted parameters, (B,), float64, or what they are made of.

        None where they are found from `per_example_gradients`, which may then serve for the sums, too. Rounding does
        not under-state them, also against what `weighted_sum` adds up.
        """
        return None

    def formed_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (B,), float64, from `per_example_gradients`, where the sums are made otherwise."""
        squares = [sum_of_squares(rows) for rows in self.gradient_chunks(saved, g, wanted)]
        return squares[0] if len(squares) == 1 else torch.cat(squares)

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        """Σ_i factor_i · g_k^(i) for each parameter (None: all ones)."""
        if factors is None:
            factors = torch.ones(self.count(g), dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)
        parts = iter(factors.split(self.chunk(g, wanted)))
        return add_up((Factors(next(parts), None), rows) for rows in self.gradient_chunks(saved, g, wanted))

    # -- examples -------------------------------------------------------------------------------------------------

    def count(self, g: Tensor) -> int:
        """B, the examples of a call with output gradients g."""
        return len(g)

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        return tuple(t[rows] if i in self.batched and t is not None else t for i, t in enumerate(saved)), g[rows]

    def without(self, saved: Saved, g: Tensor, dropped: Tensor) -> tuple[Saved, Tensor]:
        """The same call with zeros in the rows of dropped examples, (B,) booleans, whatever they hold."""
        batched = (without_rows(t, dropped) if i in self.batched and t is not None else t for i, t in enumerate(saved))
        return tuple(batched), without_rows(g, dropped)

    def size(self, wanted: Wanted) -> int:
        """How many numbers one example's gradients are."""
        if wanted not in self._numel:
            self._numel[wanted] = total_numel(*(p for p, each in zip(self.values(), wanted, strict=True) if each))
        return self._numel[wanted]

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        """How many examples' gradients are formed at a time."""
        return max(1, chunk_floats(g) // max(1, self.size(wanted)))

    def gradient_chunks(self, saved: Saved, g: Tensor, wanted: Wanted) -> Iterator[Gradients]:
        """`per_example_gradients` of a few examples at a time."""
        count, step = self.count(g), self.chunk(g, wanted)
        if count <= step:
            yield self.per_example_gradients(saved, g, wanted)
            return
        for start in range(0, count, step):
            yield self.per_example_gradients(*self.examples(saved, g, slice(start, start + step)), wanted)

    def all_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """`per_example_gradients` of all examples, formed a few at a time."""
        chunks = list(self.gradient_chunks(saved, g, wanted))
        if len(chunks) == 1:
            return chunks[0]
        return tuple(torch.cat([chunk[i] for chunk in chunks]) if each else None for i, each in enumerate(wanted))  # type: ignore[misc]

    # -- parameters that are used more than once ------------------------------------------------------------------

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """The first saved tensor and the output gradients of all positions of an example, (B, T, ...) each."""
        raise UserError(f"{type(self).__name__} says that its calls stack, but not how: give it `rows`.")

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Several calls of the layer as one, one after the other along the positions: (B, ΣT, ...)."""
        inputs, gradients = zip(*(self.rows(saved, g) for saved, g in calls), strict=True)
        return (torch.cat(inputs, 1), *calls[0][0][1:]), torch.cat(gradients, 1)

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts | None:
        """The first parameter's gradients as sums of outer products, in the order of its axes; None: not of that kind.

        Two uses of a parameter that both have them get their inner product from them; others are materialised.
        """
        return None


class ParameterRule(LayerRule):
    """One parameter (*shape) of a module that has no rule, or is bypassed; see `groupwise.clipping.per_example`."""

    batched = ()

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.parameter_names = (name,)  # type: ignore[misc]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of the copies, (B, *shape)."""
        return (upcast(g),)


class FoldedRule(LayerRule):
    """Another rule on (B·k, …) rows, whose gradients are materialised row by row and added up for each example."""

    def __init__(self, inner: LayerRule, layout: Layout) -> None:
        super().__init__(inner.module)
        self.inner, self.layout = inner, layout
        self.batched = inner.batched  # type: ignore[misc]

    def values(self) -> list[Any]:
        """As the layer itself."""
        return self.inner.values()

    def count(self, g: Tensor) -> int:
        return len(g) // max(1, self.layout.each)

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        return max(1, self.inner.chunk(g, wanted) // max(1, self.layout.each))

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        at = self.layout.rows_of(len(g), rows).to(g.device)
        chosen = tuple(t[at] if i in self.inner.batched and t is not None else t for i, t in enumerate(saved))
        return chosen, g[at]

    def without(self, saved: Saved, g: Tensor, dropped: Tensor) -> tuple[Saved, Tensor]:
        """The same call with zeros in the rows of dropped examples."""
        k = self.layout.each
        return super().without(
            saved, g, dropped.repeat(k) if self.layout.order is Order.TILED else dropped.repeat_interleave(k)
        )

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """(B, *shape) for each wanted parameter."""
        rows = self.inner.all_gradients(saved, g, wanted)
        return tuple(None if r is None else self.layout.examples_first(upcast(r)).sum(1) for r in rows)


def add_up(weighed: Iterable[tuple[Factors, Gradients]]) -> Gradients:
    """Σ_i factor_i · g^(i) for each parameter, from factors and gradients (n, *shape) of a few examples each."""
    totals: list[Tensor | None] | None = None
    for factors, gradients in weighed:
        totals = totals or [None] * len(gradients)
        for i, rows in enumerate(gradients):
            if rows is not None:
                totals[i] = add_weighed_rows(totals[i], factors, rows)
    return tuple(totals or ())


def clipped_sum(rule: LayerRule, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
    """Norms, factors and sums of a few examples at a time, from gradients that are formed once."""
    chunks = rule.gradient_chunks(saved, g, wanted)
    return add_up((clip(sum_of_squares(rows)), rows) for rows in chunks)


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


def total_numel(*tensors: object) -> int:
    """How many numbers these tensors hold together; anything else holds none."""
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def in_format_of(x: Any, g: Tensor) -> Tensor:
    """g in the memory format of x, contiguous or channels_last: kernels read the two side by side."""
    last = isinstance(x, Tensor) and x.dim() == 4 and not x.is_contiguous()
    last = last and x.is_contiguous(memory_format=torch.channels_last)
    return g.contiguous(memory_format=torch.channels_last) if last else g.contiguous()
