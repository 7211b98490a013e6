"""Clips normalisations over the last axes: LayerNorm and RMSNorm.

One example's weight gradient is Σ g∘x̂ and its bias gradient Σ g, over all positions of a number of the last axes.

RMSNorm has x̂ = x/√(mean x² + eps). `nn.RMSNorm` is known by its type. The many classes of transformers (Llama, Qwen,
Gemma, T5 ...) are known by what they compute: a module with one 1-D weight and an eps is tried on a few numbers, with
its own weight and with others, and taken if it gives w·x̂ or (1 + w)·x̂ each time. They normalise in float32 at least;
here float64 stays float64.
"""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Iterator
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule
from groupwise.errors import UserError

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
CLOSE = 1e-5
"""How far a module that computes in float32 may be from the formula, relative to |x̂|·(1 + |w|)."""
LONGEST = 4096
"""Rows of more numbers than this are too long for `vector_norm`, which adds up one after the other in float32."""


@register_rule
class LayerNormRule(LayerRule):
    """`nn.LayerNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.LayerNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    features_last: ClassVar[bool] = True
    batched: ClassVar[tuple[int, ...]] = (0, 3, 4)
    module: nn.LayerNorm

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        shape = list(self.module.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, self.module.eps)
        return y, (x, weight, bias, mean, rstd)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, bias, mean, rstd = saved
        shape = list(self.module.normalized_shape)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g, x, shape, mean, rstd, weight, bias, [True, False, False])[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, _, _, mean, rstd = saved
        assert x is not None and mean is not None and rstd is not None
        g = upcast(g)
        shape = g.shape[g.dim() - len(self.module.normalized_shape) :]
        between = tuple(range(1, g.dim() - len(shape)))
        weight = bias = None
        if wanted[0]:
            product = (upcast(x) - mean).mul_(g)
            if between:
                rows = product.flatten(1, len(between)).flatten(2)
                scales = rstd.to(rows.dtype).reshape(len(x), 1, rows.shape[1])
                weight = torch.bmm(scales, rows).view(len(x), *shape)
            else:
                weight = product.mul_(rstd)
        if wanted[1]:
            bias = g.sum(between) if between else g
        return weight, bias


class Form(NamedTuple):
    """What a module was found to compute: (plus_one + w)·x̂."""

    eps: float
    plus_one: bool
    keeps_dtype: bool
    """Half-precision inputs give half-precision outputs, though the weight is float32."""


class _RMSNorm(LayerRule):
    """The mathematics: weight (*shape), over the trailing axes of x that have its shape."""

    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    batched: ClassVar[tuple[int, ...]] = (0, 2)
    features_last: ClassVar[bool] = True

    @abstractmethod
    def _form(self, x: Tensor) -> Form:
        """What the module computes on inputs like `x`."""

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        (weight,) = parameters
        assert weight is not None
        if x.dim() <= weight.dim() or x.shape[-weight.dim() :] != weight.shape:
            raise UserError(
                f"{type(self.module).__name__} got an input of shape {tuple(x.shape)}: the batch must come first, and "
                f"{tuple(weight.shape)} last."
            )
        form, wide = self._form(x), upcast(x)
        used = 1 + upcast(weight) if form.plus_one else upcast(weight)
        if used.numel() <= LONGEST:
            mean = torch.linalg.vector_norm(wide, dim=_axes(used), keepdim=True).square_().div_(used.numel())
        else:
            mean = wide.square().mean(_axes(used), keepdim=True)
        rstd = mean.add_(form.eps).rsqrt_()
        y = (wide * rstd).mul_(used) if used.dtype == wide.dtype else wide * rstd * used
        return y.to(x.dtype) if form.keeps_dtype else y, (x, used, rstd)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        """(g∘w)/rms - x·⟨g∘w, x⟩/(n·rms³)."""
        x, used, rstd = saved
        assert x is not None and used is not None and rstd is not None
        wide, g = upcast(x), upcast(g)
        along = (wide * g).flatten(-used.dim()) @ used.flatten()
        along = along.view(rstd.shape) * rstd.pow(3).div_(-used.numel())
        return (g * used).mul_(rstd).addcmul_(wide, along).to(x.dtype)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, used, rstd = saved
        assert x is not None and used is not None and rstd is not None
        rows = (upcast(x) * upcast(g)).reshape(len(x), -1, used.numel())  # (B, T, n)
        return (torch.bmm(rstd.reshape(len(x), 1, -1).to(rows.dtype), rows).view(len(x), *used.shape),)


@register_rule
class RMSNormRule(_RMSNorm):
    """`nn.RMSNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.RMSNorm
    autocast: ClassVar = "float32"
    module: nn.RMSNorm

    def _form(self, x: Tensor) -> Form:
        eps = self.module.eps
        return Form(torch.finfo(upcast(x).dtype).eps if eps is None else eps, False, True)


@register_rule
class FoundRMSNormRule(_RMSNorm):
    """Any module of one 1-D weight (n,) that was found to compute w·x̂ or (1 + w)·x̂ over the last axis."""

    layer_type: ClassVar[type[nn.Module]] = nn.Module
    autocast: ClassVar = "keep"  # these modules choose their precision themselves

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        form = find_form(module)
        assert form is not None
        self._found = form

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        return find_form(module) is not None

    def _form(self, x: Tensor) -> Form:
        return self._found


def find_form(module: nn.Module) -> Form | None:
    """Which RMSNorm a module computes, or None: no module of one 1-D weight and an eps, or something else.

    The module itself is not run, a copy is; neither it nor a random generator is changed.
    """
    weight = module._parameters.get("weight")
    eps = next((module.__dict__[name] for name in EPS_NAMES if name in module.__dict__), None)
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if type(module).forward.__module__.startswith("torch.") or names != ["weight"] or not isinstance(eps, float):
        return None
    if weight is None or weight.dim() != 1 or weight.numel() < 2 or module._modules or module._buffers:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:  # a gate that it may be given changes the result
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            low = _output(module, _numbers(len(weight)), _numbers(3, len(weight)).bfloat16(), True)
            keeps = low.dtype == torch.bfloat16
            for form in (Form(eps, False, keeps), Form(eps, True, keeps)):
                if all(_fits(form, *trial, _output(module, *trial)) for trial in _trials(weight.detach(), eps)):
                    return form
    except Exception:  # whatever it raises, it cannot be run on such a tensor
        return None
    return None


def _trials(own: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Weights, inputs of two to four axes, and whether in training; some inputs so small that eps counts."""
    n = len(own)
    weights = [_numbers(n), 3 * _numbers(2, n)[1]]
    if type(own) is Tensor and own.device.type != "meta":  # neither a shard nor a promise
        weights.append(own.cpu())
    x = (_numbers(2, 2, 3, n) + 0.2) * torch.tensor([1.0, eps**0.5, 100.0]).view(3, 1)
    for dtype, training in product((torch.float32, torch.float64), (True, False)):
        for weight, inputs in product(weights, (x, x[0], x[0, 0])):
            yield weight.to(dtype), inputs.to(dtype), training


def _numbers(*shape: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern or a random generator."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return (count.square() * 0.6180339887).frac().mul(2).sub(1).float().view(shape)


def _output(module: nn.Module, weight: Tensor, x: Tensor, training: bool) -> Tensor:
    """What a copy of the module, with another weight, makes of x."""
    twin = type(module).__new__(type(module))
    own = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(module).items()
    }
    twin.__dict__ = {**own, "_parameters": {"weight": nn.Parameter(weight, requires_grad=False)}, "training": training}
    y = type(module).forward(twin, x)
    if not isinstance(y, Tensor):
        raise TypeError("an RMSNorm gives one tensor")
    return y


def _fits(form: Form, weight: Tensor, x: Tensor, training: bool, y: Tensor) -> bool:
    """Whether y is what the form says."""
    x, weight = x.double(), weight.double()
    normed = x * (x.square().mean(-1, keepdim=True) + form.eps).rsqrt()
    error = (y - normed * (form.plus_one + weight)).abs()
    return y.shape == x.shape and bool((error <= CLOSE * normed.abs() * (1 + weight.abs())).all())


def _axes(used: Tensor) -> list[int]:
    """The trailing axes that have the weight's shape."""
    return list(range(-used.dim(), 0))
