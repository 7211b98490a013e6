"""Defines layer rules, which tell the engine how to clip one type of layer, and finds the rule of a module.

A rule needs three methods: `forward`, `input_gradient` and `per_example_gradients`. Norms and sums follow from them.
A rule that computes these without per-example gradients overrides `squared_norms` and `weighted_sum`.
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
"""For each parameter of a rule, whether its gradient is needed."""
Gradients = tuple[Tensor | None, ...]
Clip = Callable[[Tensor], Factors]
"""Squared norms (n,) of the next n examples -> their clip factors."""


class LayerRule(ABC):
    """How one type of layer is clipped."""

    layer_type: ClassVar[type[nn.Module] | tuple[type[nn.Module], ...]]
    parameter_names: ClassVar[tuple[str, ...]]
    autocast: ClassVar[Literal["lower", "float32", "keep"]] = "lower"
    """What torch.autocast does to this layer's inputs: lower precision, float32, or nothing."""
    batched: ClassVar[tuple[int, ...]] = (0,)
    """Indices of the saved tensors whose first axis is the batch."""
    features_last: ClassVar[bool] = False
    """Whether the layer acts on the last axis alone, so that there may be any other axes in any order."""
    stacks: ClassVar[bool] = False
    """Whether the rule implements `rows`, so that several calls can be stacked into one."""
    indexed: ClassVar[bool] = False
    """Whether a sum touches few rows of the parameter (an embedding), and the rule implements `weighted_rows`."""

    def __init__(self, module: nn.Module, methods: NormMethods | None = None) -> None:
        self.module = module
        self.methods = NormMethods() if methods is None else methods
        """Which norm formula the layer uses, chosen once per size."""
        self._numel: dict[Wanted, int] = {}

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        """Whether this rule applies to the module; it does to a subclass only if that does not override `forward`."""
        kinds = cls.layer_type if isinstance(cls.layer_type, tuple) else (cls.layer_type,)
        return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)

    def values(self) -> list[Any]:
        """The parameters' values, in the order of `parameter_names`."""
        return [self.module._parameters.get(name) for name in self.parameter_names]

    def has_batch(self, axes: int) -> bool:
        """Whether the first axis of a module input with `axes` axes is a batch axis."""
        return False

    # -- the forward pass -----------------------------------------------------------------------------------------

    def prepare(self, x: Tensor) -> Tensor:
        """Preprocess the input with ordinary autograd, outside the rule (unusual paddings, say)."""
        return x

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        """The layer's output, and what its backward needs: a tuple whose positions mean the same at every call."""
        raise UserError(f"{type(self).__name__} has no forward: a layer's rule needs one.")

    # -- the backward pass ----------------------------------------------------------------------------------------

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """The gradient of the input, of its shape; None if the input has none (embedding)."""
        raise UserError(f"{type(self).__name__} has no input_gradient: a layer's rule needs one.")

    def begin_backward(self, saved: Saved, g: Tensor, needs_input: bool) -> tuple[Tensor | None, Saved]:
        """The input gradient, if it is needed, and the tuple that replaces `saved` from here on. A rule whose kernel
        computes more than the input gradient keeps the rest there."""
        return self.input_gradient(saved, g) if needs_input else None, saved

    @abstractmethod
    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """Each wanted parameter's per-example gradients (B, *shape), float32 or better; None for the others."""

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Terms | Tensor | None:
        """‖g_k^(i)‖² over the wanted parameters, (B,), float64, or `Terms` to compute them from.

        None: compute them from `per_example_gradients`, which the sums may use too. Rounding must not make a norm
        smaller than that of the gradient in `weighted_sum`.
        """
        return None

    def formed_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (B,), float64, from `per_example_gradients`, if `weighted_sum` does not use these gradients."""
        squares = [sum_of_squares(rows) for rows in self.gradient_chunks(saved, g, wanted)]
        return squares[0] if len(squares) == 1 else torch.cat(squares)

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        """Σ_i factor_i · g_k^(i) for each parameter; factors (B,), or None for all ones."""
        if factors is None:
            factors = torch.ones(self.count(g), dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)
        parts = iter(factors.split(self.chunk(g, wanted)))
        return add_up((Factors(next(parts), None), rows) for rows in self.gradient_chunks(saved, g, wanted))

    # -- examples -------------------------------------------------------------------------------------------------

    def count(self, g: Tensor) -> int:
        """B, the number of examples of a call with output gradients g."""
        return len(g)

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The saved tensors and output gradients of some examples."""
        return tuple(t[rows] if i in self.batched and t is not None else t for i, t in enumerate(saved)), g[rows]

    def without(self, saved: Saved, g: Tensor, dropped: Tensor) -> tuple[Saved, Tensor]:
        """The same call with zeros in the rows of dropped examples, (B,) booleans, even if these hold NaN."""
        batched = (without_rows(t, dropped) if i in self.batched and t is not None else t for i, t in enumerate(saved))
        return tuple(batched), without_rows(g, dropped)

    def size(self, wanted: Wanted) -> int:
        """The number of entries of one example's gradients."""
        if wanted not in self._numel:
            self._numel[wanted] = total_numel(*(p for p, each in zip(self.values(), wanted, strict=True) if each))
        return self._numel[wanted]

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        """How many per-example gradients are formed at a time."""
        return max(1, chunk_floats(g) // max(1, self.size(wanted)))

    def gradient_chunks(self, saved: Saved, g: Tensor, wanted: Wanted) -> Iterator[Gradients]:
        """`per_example_gradients`, a few examples at a time."""
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
        """The first saved tensor and the output gradients, (B, T, ...) each, T positions per example."""
        raise UserError(f"{type(self).__name__} has stacks=True, but no rows(): implement it.")

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Several calls of the layer as one, concatenated along the positions: (B, ΣT, ...)."""
        inputs, gradients = zip(*(self.rows(saved, g) for saved, g in calls), strict=True)
        return (torch.cat(inputs, 1), *calls[0][0][1:]), torch.cat(gradients, 1)

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts | None:
        """The first parameter's per-example gradients as sums of outer products, in the order of its axes; or None.

        If all uses of a shared parameter have them, they give the uses' inner products without forming gradients.
        """
        return None


class ParameterRule(LayerRule):
    """One parameter (*shape) of a module without a rule; see `groupwise.clipping.per_example`."""

    batched = ()

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.parameter_names = (name,)  # type: ignore[misc]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of the copies, (B, *shape)."""
        return (upcast(g),)


class FoldedRule(LayerRule):
    """Applies another rule to (B·k, …) rows, and adds up the k gradients of each example."""

    def __init__(self, inner: LayerRule, layout: Layout) -> None:
        super().__init__(inner.module)
        self.inner, self.layout = inner, layout
        self.batched = inner.batched  # type: ignore[misc]

    def values(self) -> list[Any]:
        return self.inner.values()

    def count(self, g: Tensor) -> int:
        return len(g) // max(1, self.layout.rows_per_example)

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        return max(1, self.inner.chunk(g, wanted) // max(1, self.layout.rows_per_example))

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        at: Any = self.layout.rows_of(len(g), rows).to(g.device)  # indices select rows as a slice does
        return super().examples(saved, g, at)

    def without(self, saved: Saved, g: Tensor, dropped: Tensor) -> tuple[Saved, Tensor]:
        k = self.layout.rows_per_example
        return super().without(
            saved, g, dropped.repeat(k) if self.layout.order is Order.TILED else dropped.repeat_interleave(k)
        )

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
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
    """Compute norms, factors and weighted sums chunk by chunk, from gradients that are formed once."""
    chunks = rule.gradient_chunks(saved, g, wanted)
    return add_up((clip(sum_of_squares(rows)), rows) for rows in chunks)


@lru_cache
def device_memory(kind: str, index: int) -> int:
    """The memory of a device in bytes; 16 GiB if it is unknown."""
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(index).total_memory)
    return 1 << 34


def chunk_floats(like: Tensor) -> int:
    """Entries that a chunk of per-example gradients may hold: about a core's cache, or a 64th of a GPU's memory."""
    device = like.device
    return 1 << 20 if device.type == "cpu" else device_memory(device.type, device.index or 0) // 256


_RULES: list[type[LayerRule]] = []


def register_rule(rule: type[LayerRule]) -> type[LayerRule]:
    """Class decorator that registers a rule. A later one takes precedence, so a user's rule can replace a built-in."""
    _RULES.insert(0, rule)
    return rule


def find_rule(module: nn.Module) -> type[LayerRule] | None:
    """The rule for a module; None if its parameters are clipped by copies, one per example."""
    own = set(module._parameters)
    for rule in _RULES:
        if rule.handles(module) and own <= set(rule.parameter_names):
            # A computed weight (parametrization) is not a parameter. Reading it could change buffers.
            return None if any(_is_computed(module, name) for name in rule.parameter_names) else rule
    return None


def _is_computed(module: nn.Module, name: str) -> bool:
    if is_parametrized(module, name):
        return True
    return name not in module._parameters and getattr(module, name, None) is not None


def total_numel(*tensors: object) -> int:
    """The number of entries of all tensors together; other objects count as 0."""
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def in_format_of(x: Any, g: Tensor) -> Tensor:
    """g in the memory format of x, contiguous or channels_last, as kernels expect."""
    last = isinstance(x, Tensor) and x.dim() == 4 and not x.is_contiguous()
    last = last and x.is_contiguous(memory_format=torch.channels_last)
    return g.contiguous(memory_format=torch.channels_last) if last else g.contiguous()
