"""In float32 no norm is understated by more than 1e-6, and no clipped example exceeds its threshold by more."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, automatic_factors, flat, per_layer
from groupwise.clipping.gram import gram_norms
from groupwise.clipping.precision import BLOCK, floor, longest_sum, rounding_slack, slack_of, squared_row_norms
from tests.clipping.traced import clip_batch
from trust.norms.__main__ import ALLOWED


def understated(rows: Tensor, squares: Tensor) -> float:
    return float((1 - (squares.double() / rows.flatten(1).double().square().sum(1)).sqrt()).max())


def test_the_worst_block_is_within_its_bound():
    for number in torch.linspace(1, 2, 500).tolist():
        rows = torch.full((1, BLOCK), number)
        assert understated(rows, squared_row_norms(rows)) <= 8.1e-7


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_squared_row_norms_include_every_entry_once(size, kind):
    rows = torch.randn(4, size, dtype=kind)
    squares = squared_row_norms(rows)
    assert squares.dtype == torch.float64 and squares.shape == (4,)
    tolerance = 1e-12 if kind == torch.float64 else 1e-6
    torch.testing.assert_close(squares, rows.double().square().sum(1), rtol=tolerance, atol=0)
    assert squared_row_norms(rows[:0]).shape == (0,)


def test_nan_inf_and_overflow_give_no_finite_norm():
    rows = torch.ones(3, 200)
    rows[0, 3], rows[1, 4], rows[2, 5] = float("nan"), float("inf"), 1e20
    assert not bool((squared_row_norms(rows) < float("inf")).any())


def test_the_floor_covers_squares_that_underflow():
    rows = torch.full((2, 3, 100), 1e-19)
    assert float(rows.double().square().sum((1, 2))[0]) < floor(300, rows.dtype) < 1e-35


def clipped(layer: nn.Module, x: Tensor, g: Tensor, threshold: float, **options: object) -> tuple[float, float]:
    """The norm that the engine states for one example, and the true norm of its clipped gradient."""
    with attach(layer, flat(layer), threshold, **options) as engine:  # type: ignore[arg-type]
        clip_batch(engine, lambda x, g: (layer(x) * g).flatten(1).sum(1), x, g)
        stated = float(engine.per_example_norms[0, 0])
    return stated, sum(float(p.grad.double().square().sum()) for p in layer.parameters()) ** 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("positions", [1, 4])
def test_squares_that_underflow_do_not_hide_a_large_gradient(positions):
    """Squares of output gradients of 1e-23 underflow, but with inputs of 1e18 the gradient has entries of 1e-5."""
    layer = nn.Linear(50, 30, bias=False)
    nn.init.zeros_(layer.weight)
    x, g = torch.full((1, positions, 50), 1e18), torch.full((1, positions, 30), 1e-23)
    stated, norm = clipped(layer, x, g, 1e-5, formula="gram")
    true = positions * 1e-5 * 1500**0.5
    assert stated >= true * (1 - ALLOWED) and norm <= 1e-5 * (1 + ALLOWED)


@pytest.mark.parametrize("rule", [None, automatic_factors(1e-20)])
def test_thresholds_whose_squares_underflow_still_hold(rule):
    layer = nn.Linear(3, 2, bias=False)
    x, g = torch.ones(1, 2, 3), torch.full((1, 2, 2), 1e-24)
    options = {} if rule is None else {"clip_rule": rule}
    assert clipped(layer, x, g, 1e-26, formula="materialize", **options)[1] <= 1e-26


def test_an_example_whose_norm_overflows_is_left_out():
    layer = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(layer.weight)
    x = torch.full((1, 3), 1e15)
    with attach(layer, per_layer(layer), 1.0) as engine:
        clip_batch(engine, lambda x: (layer(x) * torch.full((1, 2), 1e15)).sum(1), x)
        assert engine.nonfinite == 1
    assert not bool(layer.weight.grad.any())


@pytest.mark.parametrize("positions", [2, 4, 8, 31])
def test_slack_covers_long_sums_of_equal_products(positions):
    """The worst case is that all roundings have the same sign; the loop searches for such numbers."""
    for number in torch.linspace(1, 2, 60):
        x, g = torch.full((1, positions, 16384), float(number)), torch.full((1, positions, 8192), float(number))
        true = number.double() ** 4 * positions**2 * 16384 * 8192
        assert float(gram_norms(x, g, False)) >= true * (1 - 2 * ALLOWED)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("terms", [500, 1024, 2304, 3072, 4096, 50257])
def test_slack_covers_sequential_sums_of_equal_terms(terms, device):
    """A library may sum every part of a long sum sequentially; there are only few parts."""
    part = min(terms, longest_sum(torch.device(device)))
    products = np.linspace(0.25, 1, 3000) ** 2
    total = np.zeros(len(products), np.float32)
    for _ in range(part):
        total = (total + products).astype(np.float32)  # a multiplication and an addition round once
    lost = 1 - total / (part * products)
    assert 0 < lost.max() <= slack_of(terms, torch.float32, torch.device(device))


@pytest.mark.parametrize("seed", range(5))
def test_cancelling_sums_by_another_product_than_the_norm_are_clipped(seed):
    """Output gradients that sum to zero leave rounding errors only, which differ between products."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model.forward = lambda x: torch.cat([model[0](x), model[1](x)])  # type: ignore[method-assign]
    x, g = torch.ones(1, 64, 256), torch.randn(1, 64, 256)
    g[:, -1] -= g.sum(1)
    with attach(model, flat(model), 1e-7, formula="materialize") as engine:
        clip_batch(engine, lambda x, g: ((model[0](x) + model[1](x)) * g).sum((1, 2)), x, g)
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
    assert 0 < norm <= 1e-7 * (1 + ALLOWED)


def relative_excess(model: nn.Module, examples: tuple[Tensor, ...], norms: str) -> float:
    """By how much, relatively, one example's clipped sum exceeds its threshold; the other example's loss is zero."""
    with attach(model, flat(model), 1.0, norms=norms) as engine:
        for threshold in (None, 1 / 3):
            model.zero_grad()
            if threshold is not None:
                engine.set_thresholds(engine.per_example_norms[:, 0].clone() * threshold)
            clip_batch(engine, lambda x, w: model(x) * w, *examples, torch.tensor([1.0, 0.0]))
        limit = float(engine.thresholds[0])
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    return squares**0.5 / limit - 1


class BlankImages(nn.Module):
    """All positions are equal, and so are their outer products and the roundings of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.conv(x).relu().mean((2, 3)))
        return nn.functional.cross_entropy(logits, torch.arange(1, 1 + len(x)), reduction="none")


class RepeatedToken(nn.Module):
    """The sum of the embeddings of a text that repeats one token."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(5, 8, mode="sum") if bag else nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        return (y if y.dim() == 2 else y.sum(1)).tanh().sum(1)


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("kind", ["image", "text", "bag"])
def test_sums_of_equal_terms_do_not_exceed_the_threshold(kind, norms):
    """By at most 1e-6, the documented bound; without slack it was 1e-4."""
    for seed, value in enumerate((0.3, 0.7371, 1.0)):
        torch.manual_seed(seed)
        if kind == "image":
            model, x = BlankImages(), torch.full((2, 3, 224, 224), value)
        else:
            model, x = RepeatedToken(kind == "bag"), torch.full((2, 10_000), 3)
            nn.init.constant_(model.words.weight, value * 1e-4)
        assert relative_excess(model, (x,), norms) < 1e-6


def test_slack_uses_the_precision_of_the_computation():
    double = torch.ones(1, dtype=torch.float64)
    assert float(rounding_slack(double, 4, torch.float32)) == 8 * torch.finfo(torch.float32).eps
    assert float(rounding_slack(double, 4)) == 8 * torch.finfo(torch.float64).eps


def test_a_bias_gradient_sums_positions_before_examples():
    """A sequential sum of 65536 equal numbers would be off by up to 7e-4."""
    layer = nn.Linear(1, 3)
    layer.weight.requires_grad_(False)
    with attach(layer, per_layer(layer), 1.0) as engine:
        clip_batch(engine, lambda x: (layer(x) * 1.3).sum((1, 2)), torch.zeros(1, 65536, 1))
    assert float(layer.bias.grad.double().square().sum().sqrt()) == pytest.approx(1.0, rel=ALLOWED)


@pytest.mark.parametrize(("trains", "norms", "size"), [("bias", "bookkeeping", 1.0), ("all", "ghost", 0.0)])
def test_a_bias_gradient_of_a_convolution_does_too(trains, norms, size):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 16, 3, padding=1), torch.randn(1, 3, 256, 256)
    layer.weight.requires_grad_(trains == "all")
    heavy = torch.rand(16, 256, 256)
    with attach(layer, flat(layer), 1e-3, norms=norms) as engine:
        clip_batch(engine, lambda x: (layer(x) * heavy).mean((1, 2, 3)), size * x)
    squares = [float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None]
    assert sum(squares) ** 0.5 == pytest.approx(1e-3, rel=ALLOWED)


def test_norms_of_many_layers_add_up_in_float64():
    """One layer has norm 1; float32 would drop the square of each of the 200 others."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(201)])
    sizes = [1.0, *[1e-4] * 200]

    def losses_of(x: Tensor) -> Tensor:
        return torch.cat([layer(size * x) for layer, size in zip(model, sizes, strict=True)], 1).sum(1)

    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, losses_of, torch.ones(1, 1))
        assert float(engine.squared_norms[0][0]) == pytest.approx(1 + 200 * 1e-8, rel=1e-9)
