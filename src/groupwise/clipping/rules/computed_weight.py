"""Clips linear layers whose weight `weight_norm` or `spectral_norm` computes: norms go through the computation.

An example's gradient G = Σ_t g_t x_tᵀ for the weight W that is used becomes that of the parameters by a map that is
the same for all examples, so sums go through it once. Norms go through it in closed form.

- `weight_norm`: W_o = l_o n_o for each filter o, n = v/‖v‖. With a = l/‖v‖ the gradient for v_o is
  a_o (G_o - ⟨G_o, n_o⟩ n_o), of squared norm a_o² (‖G_o‖² - ⟨G_o, n_o⟩²), and that for l_o is ⟨G_o, n_o⟩.
- `spectral_norm`: W = V/σ, σ = uᵀV w. The gradient for V is (G - ⟨G, W⟩ u wᵀ)/σ, of squared norm
  (‖G‖² - 2 ⟨G, W⟩ uᵀG w + ⟨G, W⟩² ‖u‖² ‖w‖²)/σ².

⟨G_o, n_o⟩ = Σ_t g_to (x_t · n_o), and ⟨G, W⟩ and uᵀG w likewise, are found from the two sides of the product.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from groupwise.clipping.cost_model import norms_from_products, self_products
from groupwise.clipping.precision import at_least_zero, autocast, rounding_slack, slack_of, squared_row_norms, upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted, chunk_floats, register_rule
from groupwise.clipping.rules.linear import LinearRule

_LIST = "parametrizations.weight"


class ComputedWeightRule(LinearRule):
    """`nn.Linear` with one parametrization of its weight, over the first axis.

    `saved` is (x, weight used, x Dᵀ or None, D (p, d), …): D and what follows is what the map is made of.
    """

    autocast: ClassVar = "keep"  # weights are computed as they are stored; `prepare` and `forward` lower the rest
    claims: ClassVar[str] = _LIST
    stacks: ClassVar[bool] = False
    batched: ClassVar[tuple[int, ...]] = (0, 2)
    computation: ClassVar[type[nn.Module]]
    module: nn.Linear

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        found = _computation(module)
        return super().handles(module) and type(found) is cls.computation and bool(found.dim == 0)

    def values(self) -> list[Tensor | None]:
        inside, bias = self.module.get_submodule(_LIST)._parameters, self.module._parameters["bias"]
        return [bias if name == "bias" else inside[name.rpartition(".")[2]] for name in self.parameter_names]

    def prepare(self, x: Tensor) -> Tensor:
        return autocast("lower", x, [])[0]

    def keep(self, saved: Saved, context: RuleContext) -> Saved:
        """The product only where norms go by inner products."""
        product = saved[2]
        if product is None or context.save_memory or self.way(*self._as_rows(saved, product), context) != "gram":
            return (*saved[:2], None, *saved[3:])
        return saved

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        assert saved[1] is not None
        return g @ saved[1]

    def outer_products(self, saved: Saved, g: Tensor) -> None:  # type: ignore[override]
        """They are of the weight used."""

    def uses_weight(self, wanted: Wanted) -> bool:
        return wanted[0] or (len(wanted) > 2 and wanted[2])

    def way(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        x = saved[0]
        assert x is not None
        return "gram" if x.shape[1] == 1 else self.choose(saved, g, context)

    def gram_squares(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """From inner products of a few examples at a time, and what the bias adds."""
        step = max(1, chunk_floats(g) // g.shape[1] ** 2)
        parts = (self.examples(saved, g, slice(start, start + step)) for start in range(0, len(g), step))
        squares = torch.cat([self.squares_of_sides(*part, wanted) for part in parts])
        return squares + squared_row_norms(self.bias_gradients(saved, g)) if wanted[1] else squares

    def measure(self, saved: Saved, wanted: Wanted) -> Callable[[Tensor], Tensor]:
        return lambda weight: self.squares_of_weight(saved, self._turned(weight), wanted)

    def finish(self, saved: Saved, weight: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        if weight is None:
            return self._wanted(None, bias, wanted)
        return self._wanted([part[0] for part in self.pull(saved, self._turned(weight).unsqueeze(0))], bias, wanted)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, g = map(upcast, self.rows(saved, g))
        pulled = self.pull(saved, g.mT @ x) if self.uses_weight(wanted) else None
        return self._wanted(pulled, g.sum(1) if wanted[1] else None, wanted)

    @abstractmethod
    def pull(self, saved: Saved, weight: Tensor) -> list[Tensor]:
        """From gradients (n, p, d) of the weight used to those of the parameters but the bias."""

    @abstractmethod
    def squares_of_weight(self, saved: Saved, weight: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) of those, float64, from the same."""

    @abstractmethod
    def squares_of_sides(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """The same from x (n, T, d) and g (n, T, p) alone, raised by their rounding."""

    def _turned(self, weight: Tensor) -> Tensor:
        """Gradients (..., *gradient_shape) as (..., p, d)."""
        return weight.mT if self._inputs_first(self.module.in_features, self.module.out_features) else weight

    def _wanted(self, pulled: list[Tensor] | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        """In the order of the parameters: the bias is the second."""
        parts = [None] * (len(wanted) - 1) if pulled is None else pulled
        every = (parts[0], bias, *parts[1:])
        return tuple(part if each else None for part, each in zip(every, wanted, strict=True))


@register_rule
class WeightNormRule(ComputedWeightRule):
    """`torch.nn.utils.parametrizations.weight_norm`: v (p, d), bias (p,), l (p, 1).

    D is n; after it comes a (p,).
    """

    computation: ClassVar[type[nn.Module]] = parametrizations._WeightNorm  # type: ignore[attr-defined]
    parameter_names: ClassVar[tuple[str, ...]] = (f"{_LIST}.original1", "bias", f"{_LIST}.original0")

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        v, bias, lengths = parameters
        assert v is not None and lengths is not None
        norms = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        unit, scale = v / norms, lengths / norms
        used, product = (v * scale).to(x.dtype), None
        if x.dtype == unit.dtype:
            product = F.linear(x, unit)
            y = product * lengths.flatten() if bias is None else torch.addcmul(bias, product, lengths.flatten())
        else:
            y = F.linear(x, used, None if bias is None else bias.to(x.dtype))
        return y, (x, used, product, unit, scale.flatten())

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        scale = saved[4]  # the map lengthens by no more
        assert scale is not None
        return super().slack(saved, g) * (scale.abs().amax().double() + 1)

    def pull(self, saved: Saved, weight: Tensor) -> list[Tensor]:
        unit, scale = _tensors(saved[3:], weight.dtype)
        along = (weight * unit).sum(2, keepdim=True)
        return [torch.addcmul(weight, along, unit, value=-1) * scale.unsqueeze(1), along]

    def squares_of_weight(self, saved: Saved, weight: Tensor, wanted: Wanted) -> Tensor:
        unit, scale = _tensors(saved[3:], weight.dtype)
        along = (weight * unit).sum(2).double().square_()
        squares = along.sum(1) if wanted[2] else along.new_zeros(len(along))
        if wanted[0]:
            whole = squared_row_norms(weight.reshape(-1, weight.shape[2])).view(along.shape)
            whole *= 1 + slack_of(weight.shape[2], weight.dtype, weight.device)
            squares = squares + at_least_zero((whole - along) @ scale.double().square())
        return squares

    def squares_of_sides(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x, product = saved[0], saved[2]
        assert x is not None
        x, g = upcast(x), upcast(g)
        unit, scale = _tensors(saved[3:], g.dtype)
        product = x @ unit.t() if product is None else product.reshape(g.shape)
        between, longest = self_products(x), max(x.shape[1], x.shape[2], g.shape[2])
        slack = rounding_slack((torch.linalg.vector_norm(x, dim=2, keepdim=True) * g.abs()).sum(1), longest)
        along = (g * product).sum(1).abs()
        squares = squared_row_norms(along + slack) if wanted[2] else between.new_zeros(len(x), dtype=torch.float64)
        if wanted[0]:
            whole = norms_from_products(between, self_products(g * scale), False, longest)
            removed = (along - slack).clamp_min(0).double().square() @ scale.double().square()
            squares = squares + at_least_zero(whole - removed)
        return squares


@register_rule
class SpectralNormRule(ComputedWeightRule):
    """`torch.nn.utils.parametrizations.spectral_norm`: V (p, d), bias (p,).

    D is W itself; after it come u (p,), w (d,) and σ. As torch has it, u and w are constants, which a forward pass in
    training mode moves.
    """

    computation: ClassVar[type[nn.Module]] = parametrizations._SpectralNorm  # type: ignore[attr-defined]
    parameter_names: ClassVar[tuple[str, ...]] = (f"{_LIST}.original", "bias")

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        norm = _computation(self.module)
        used = norm(weight.detach())
        u, w = norm._u.clone(), norm._v.clone()
        product = F.linear(x, used.to(x.dtype))
        y = product.clone() if bias is None else product + bias.to(x.dtype)
        return y, (x, used.to(x.dtype), product, used, u, w, torch.dot(u, weight @ w))

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        used, u, w, sigma = _tensors(saved[3:], torch.float64)  # the map lengthens by no more
        return super().slack(saved, g) * ((1 + used.norm() * u.norm() * w.norm()) / sigma).abs()

    def pull(self, saved: Saved, weight: Tensor) -> list[Tensor]:
        used, u, w, sigma = _tensors(saved[3:], weight.dtype)
        along = (weight * used).sum((1, 2)).view(-1, 1, 1)
        return [(weight - along * torch.outer(u, w)) / sigma]

    def squares_of_weight(self, saved: Saved, weight: Tensor, wanted: Wanted) -> Tensor:
        return squared_row_norms(self.pull(saved, weight)[0])

    def squares_of_sides(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x, product = saved[0], saved[2]
        assert x is not None
        x, g = upcast(x), upcast(g)
        used, u, w, sigma = _tensors(saved[3:], g.dtype)
        product = x @ used.t() if product is None else upcast(product).reshape(g.shape)
        longest = max(x.shape[1], x.shape[2], g.shape[2])
        whole = norms_from_products(self_products(x), self_products(g), False, longest)
        size = (torch.linalg.vector_norm(x, dim=2) * torch.linalg.vector_norm(g, dim=2)).sum(1)
        slack = rounding_slack(size, longest * x.shape[1], g.dtype).double()
        along, across = (g * product).sum((1, 2)).double(), ((g @ u) * (x @ w)).sum(1).double()
        most = used.norm().double()
        lost = 2 * slack * (along.abs() + most * (across.abs() + slack)) + 2 * slack * most * along.abs()
        length = u.double().square().sum() * w.double().square().sum()
        return at_least_zero(whole - 2 * along * across + length * along.square() + lost) / sigma.double().square()


def _tensors(saved: Saved, dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in saved if t is not None]


def _computation(module: nn.Module) -> Any:
    """The one parametrization of a module's weight, if nothing else of it is computed."""
    lists = getattr(module, "parametrizations", None)
    if not isinstance(lists, nn.ModuleDict) or list(lists) != ["weight"]:
        return None
    (found, *more) = lists["weight"].children()
    return None if more else found
