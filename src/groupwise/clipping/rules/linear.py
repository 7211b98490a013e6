"""Clips linear layers on inputs of any number of axes: `nn.Linear`, and Hugging Face's `Conv1D` (GPT-2).

For y = x Wᵀ + b at T positions (the product of all axes between batch and features) one example's gradients are
dW = Σ_t g_t x_tᵀ = GᵀX and db = Σ_t g_t. `norm_methods.py` describes the two formulas for ‖GᵀX‖.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.gram import OuterProducts, gram_terms
from groupwise.clipping.matmul import are_by_onednn, batched, linear, product
from groupwise.clipping.norm_methods import Rates, seconds
from groupwise.clipping.norm_terms import OneRowTerms, Terms, squares_together
from groupwise.clipping.precision import (
    LONGEST_SUM,
    cut_factors,
    inflate_norms,
    keeps_half,
    product_over_rows,
    second_product_slack,
    squared_row_norms,
    upcast,
)
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule

THIN = 1 << 18
"""Up to this number of entries (low-rank adapters) the gradient is formed as (XᵀG)ᵀ if that is faster."""


@register_rule
class LinearRule(LayerRule):
    """`nn.Linear`: weight (p, d), bias (p,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.Linear
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    features_last: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    """The weight is stored as (d, p)."""

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        return linear(x, weight.t() if self.transposed else weight, bias), (x, weight)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        _, weight = saved
        return product(g, weight.t() if self.transposed else weight)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, T, d) and output gradients (B, T, p): both bfloat16, or at least float32."""
        x = saved[0]
        return (_as_rows(x), _as_rows(g)) if keeps_half(x, g) else (_as_rows(upcast(x)), _as_rows(upcast(g)))

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Terms | Tensor | None:
        x = saved[0]
        if not wanted[0]:
            return squared_row_norms(self.rows(saved, g)[1].sum(1, dtype=torch.promote_types(g.dtype, torch.float32)))
        if x.dim() == 2 or x.shape[1:-1].numel() == 1:
            return OneRowTerms(x.flatten(1), g.flatten(1), wanted[1])
        if self.methods.choose((x.shape, g.shape), x.device.type, self._costs) == "materialize":
            return None
        x, rows = self.rows(saved, g)
        terms = gram_terms(x, rows, wanted[1])
        if x.shape[1] <= LONGEST_SUM:  # then the slack of the norms covers the rounding of the sum too
            return terms
        return inflate_norms(squares_together([[terms]])[0], second_product_slack(x, rows, x.shape[1]))

    def _costs(self, rates: Rates, inputs: torch.Size, out: torch.Size) -> dict[str, float]:
        b, t, d, p = inputs[0], inputs[1:-1].numel(), inputs[-1], out[-1]
        return seconds(rates, b, t, d, p, self.methods.reuses(b * d * p, b * t * (d + p)))

    def formed_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x, rows = self.rows(saved, g)
        return inflate_norms(super().formed_norms(saved, g, wanted), second_product_slack(x, rows, x.shape[1]))

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x = saved[0]
        half = keeps_half(x, g)
        if not half:
            x, g = upcast(x), upcast(g)
        wide = torch.float32 if half else g.dtype
        weights = None if factors is None else factors.to(wide)
        weight = bias = None
        if wanted[1]:  # sum over positions first, as the norms do: this also rounds less
            sums = g.to(wide) if g.dim() == 2 else g.flatten(1, -2).sum(1, dtype=wide)
            bias = sums.sum(0) if weights is None else weights @ sums
            del sums  # the product below needs the memory
        if wanted[0]:
            if weights is not None:
                scale = (cut_factors(weights) if half else weights).view(-1, *[1] * (g.dim() - 1))
                x, g = (x * scale, g) if x.shape[-1] <= g.shape[-1] else (x, g * scale)  # the smaller of the two
            x, g = x.flatten(0, -2), g.flatten(0, -2)
            left, right = (x, g) if self.transposed else (g, x)
            weight = product_over_rows(left, right) if half else product(left.t(), right)
        return weight, bias

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, g = map(upcast, self.rows(saved, g))
        weight = None
        if wanted[0]:
            left, right = (x, g) if self.transposed else (g, x)
            turned = left.shape[2] > right.shape[2] and left.shape[2] * right.shape[2] <= THIN
            weight = batched(right.mT, left).mT if turned else batched(left.mT, right)
        return weight, g.sum(1) if wanted[1] else None

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts:
        x, g = self.rows(saved, g)
        return OuterProducts(x, g) if self.transposed else OuterProducts(g, x)


@register_rule
class HFConv1DRule(LinearRule):
    """`transformers.pytorch_utils.Conv1D`: weight (d, p), bias (p,).

    The class is recognised by its name and module, so that transformers need not be installed.
    """

    transposed: ClassVar[bool] = True

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        return any(
            kind.__name__ == "Conv1D"
            and kind.__module__ == "transformers.pytorch_utils"
            and type(module).forward is kind.__dict__.get("forward")
            for kind in type(module).__mro__
        )


def frozen_linear(rule: LinearRule, input: Tensor) -> Tensor:
    """The forward of a frozen linear layer, with the faster matmul library of the trained layers.

    The base layers of adapters take most of a step. Where torch's own product is used, this is the class's forward.
    """
    module, weight = rule.module, rule.values()[0]
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if weight is None or transformed or torch.is_autocast_enabled("cpu") or not are_by_onednn(input, weight):
        made: Tensor = type(module).forward(module, input)
        return made
    return _FrozenFunction.apply(rule, input, *rule.values())


class _FrozenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: LinearRule, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(weight)
        return rule.forward(x, weight, bias)[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, ctx.rule.input_gradient((None, *ctx.saved_tensors), g), None, None  # differentiable


def _as_rows(t: Tensor) -> Tensor:
    """(B, ..., n) -> (B, T, n)."""
    if t.dim() == 3:
        return t
    return t.unsqueeze(1) if t.dim() == 2 else t.reshape(t.shape[0], -1, t.shape[-1])
