"""Matrix products by oneDNN: correct, used only without gradients in float32, and the same after resuming."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, matmul, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.errors import UserError

pytestmark = pytest.mark.skipif(not matmul.has_onednn(), reason="this torch has no float32 products by oneDNN")


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(matmul, "LEAST", 0)
    matmul.use("onednn")
    yield
    matmul.use("auto")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    recorded, plain = [], matmul._onednn

    def record(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        recorded.append((*a.shape, len(b)))
        return plain(a, b, bias)

    monkeypatch.setattr(matmul, "_onednn", record)
    return recorded


def close(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 50, 7), (64, 33, 17)])
def test_products_are_correct_for_any_strides(calls, size, transposed: bool) -> None:
    n, k, m = size
    torch.manual_seed(0)
    a, w, bias = torch.randn(4, n, k), torch.randn(m, k), torch.randn(m)
    gaps = torch.randn(4, n, 2 * k)[:, :, :k]
    if transposed:
        a, w = a.mT.contiguous().mT, w.t().contiguous().t()
    for x in (a, gaps):
        close(matmul.linear(x, w, bias), F.linear(x.double(), w.double(), bias.double()))
        close(matmul.product(x, w.t()), x.double() @ w.double().t())
        close(matmul.batched(x, gaps.mT), x.double() @ gaps.double().mT)
    assert len(calls) == 2 * (2 + 4)


def test_products_with_gradients_or_other_dtypes_use_torch(calls) -> None:
    w = torch.randn(3, 5, requires_grad=True)
    matmul.linear(torch.randn(2, 5), w).sum().backward()  # autograd needs torch's product
    assert w.grad is not None
    with torch.no_grad():
        for dtype in (torch.float64, torch.bfloat16):
            matmul.product(torch.randn(2, 5).to(dtype), torch.randn(5, 3).to(dtype))
        matmul.use("torch")
        matmul.product(torch.randn(2, 5), torch.randn(5, 3))
    assert not calls


@pytest.mark.parametrize("norms", ["flat", "ghost", "layer"])
@pytest.mark.parametrize("formula", ["gram", "materialize"])
def test_clipped_sums_match_a_loop_over_examples(calls, norms: str, formula: str) -> None:
    torch.manual_seed(1)
    twice, frozen = nn.Linear(12, 12), nn.Linear(12, 12).requires_grad_(False)
    model = nn.Sequential(twice, nn.ReLU(), twice, frozen, nn.Tanh(), nn.Linear(12, 3, bias=False))
    x = torch.randn(6, 40, 12)
    groups = per_layer(model) if norms == "layer" else flat(model)
    thresholds = [0.01] * len(groups)

    def losses_of(rows) -> Tensor:
        return model(x[list(rows)].to(twice.weight.dtype)).mean((1, 2)).square()

    truth = clipped_sums(model.double(), lambda row: losses_of([row])[0], range(6), groups, thresholds).sums
    model.float()
    calls.clear()
    with attach(model, groups, 0.01, norms="ghost" if norms == "ghost" else "bookkeeping", formula=formula) as engine:
        engine.trace(losses_of, range(6))
        engine.clip(losses_of, range(6))
    assert len(calls) > 10
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, truth[name])


def test_unknown_libraries_are_refused_and_auto_chooses_once() -> None:
    with pytest.raises(UserError, match="matmul is 'mkl'"):
        matmul.use("mkl")
    matmul.use("auto")
    assert matmul.used() == matmul.faster() in matmul.LIBRARIES
    matmul.repeat("torch")
    assert matmul.used() == "torch"
