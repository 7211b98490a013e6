"""Products of bfloat16 rows as on a GPU, simulated on a CPU: clipped sums stay within the bound of their norms."""

import pytest
import torch
from torch import nn

from groupwise.clipping import WSConv2d, gram, precision
from groupwise.clipping.factors import Factors
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.norm_terms import squares_together
from groupwise.clipping.precision import cut_factors
from groupwise.clipping.rules import linear
from groupwise.clipping.rules.base import Gradients, Saved, clipped_sum, find_rule

C = 0.5
BOUND = 1e-6
"""Rounding may increase a clipped norm by this much relative to C (docs/privacy.md)."""


@pytest.fixture
def bfloat16_products(monkeypatch) -> None:
    """bfloat16 tensors stay bfloat16, as on a GPU."""
    for module in (precision, gram, linear):
        monkeypatch.setattr(module, "keeps_half", lambda *tensors: all(t.dtype == torch.bfloat16 for t in tensors))


def rows(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator).exp()
    return (torch.randn(shape, generator=generator) * scales).bfloat16()


LAYERS = {
    **{
        f"linear {p}x{d}, {t} positions": (lambda p=p, d=d: nn.Linear(p, d), (t, p))
        for p, d in ((6, 9), (9, 6))
        for t in (1, 2, 40)
    },
    "same": (lambda: nn.Conv2d(5, 6, 3, padding=1), (5, 9, 9)),
    "stride": (lambda: nn.Conv2d(5, 6, 3, stride=2), (5, 9, 9)),
    "groups": (lambda: nn.Conv2d(6, 4, 3, groups=2), (6, 7, 7)),
    "one_axis": (lambda: nn.Conv1d(5, 6, 3, padding=1), (5, 12)),
    "standardised": (lambda: WSConv2d(5, 6, 3, padding=1), (5, 9, 9)),
    "standardised_gain": (lambda: WSConv2d(5, 6, 3, padding=1, gain=True), (5, 9, 9)),
}
"""Name -> a layer, and the shape of an example."""


@pytest.mark.parametrize("own_group", [True, False])
@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("kind", LAYERS)
def test_no_example_exceeds_its_threshold(bfloat16_products, kind, formula, own_group):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    linear = kind.startswith("linear")
    layer, examples = make(), 30 if linear else 12
    found = find_rule(layer)
    assert found is not None
    rule = found(layer, NormMethods(formula, own_group=own_group))
    x = rows(examples, *shape, seed=5)
    values = [getattr(layer.requires_grad_(False), name) for name in rule.parameter_names]
    wanted = tuple(value is not None for value in values)
    y, saved = rule.forward(
        x, *(None if v is None else v.detach() if kind[:4] == "stan" else v.bfloat16() for v in values)
    )
    g = rows(*y.shape, seed=6)
    truth = []
    double = make().double()
    double.load_state_dict(layer.state_dict())
    for i in range(examples):
        out = (double(x[i : i + 1].double()) * g[i : i + 1].double()).sum()
        truth.append([part.detach() for part in torch.autograd.grad(out, list(double.parameters()))])
    true = torch.stack([sum(part.square().sum() for part in parts) for parts in truth])
    computed_factors: list[torch.Tensor] = []

    def clip(squares: torch.Tensor) -> Factors:
        computed_factors.append((C / squares.sqrt()).clamp_max(1.0).float())
        return Factors.of(computed_factors[-1])

    def norm(gradients: Gradients) -> float:
        return sum(float(part.double().square().sum()) for part in gradients if part is not None) ** 0.5

    def squares_of(saved: Saved, g: torch.Tensor) -> torch.Tensor:
        closed = rule.squared_norms(saved, g, wanted)
        return squares_together([[rule.formed_norms(saved, g, wanted) if closed is None else closed]])[0]

    def clip_and_sum(saved: Saved, g: torch.Tensor) -> Gradients:
        if formed:
            return clipped_sum(rule, saved, g, clip, wanted)
        return rule.weighted_sum(saved, g, clip(squares_of(saved, g)).values, wanted)

    formed = own_group and rule.squared_norms(saved, g, wanted) is None
    squares = squares_of(saved, g)
    assert bool((squares >= true * (1 - 2e-6)).all())
    torch.testing.assert_close(squares, true, rtol=1e-3 if linear else 3e-3, atol=0)
    for i in range(examples):
        one = rule.examples(saved, g, slice(i, i + 1))
        assert norm(clip_and_sum(*one)) <= C * (1 + BOUND)
    computed_factors.clear()
    sums = clip_and_sum(saved, g)
    factors = torch.cat(computed_factors).double()
    names = [name for name, _ in double.named_parameters()]
    for name, gradient in zip(rule.parameter_names, sums, strict=True):
        if gradient is not None:
            assert gradient.dtype == torch.float32
            each = torch.stack([parts[names.index(name)] for parts in truth])
            weights = cut_factors(factors.float()).double() if linear and not formed and name == "weight" else factors
            close = 1e-5 if linear else 1e-4
            expected = torch.einsum("b,b...->...", weights, each)
            torch.testing.assert_close(gradient.double(), expected, rtol=close, atol=close)
