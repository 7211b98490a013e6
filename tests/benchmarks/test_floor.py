"""The floor of a method is its ratio of counted operations to plain training."""

import pytest
import torch

from benchmarks.meters import count_operations, floor
from benchmarks.methods import make
from benchmarks.workloads import build
from groupwise.clipping import matmul


def test_second_backward_pass_lowers_the_floor() -> None:
    methods = [make(name, build("mlp", tiny=True)) for name in ("none", "flat", "ghost")]
    for method in methods:
        method.step()  # the first step also initialises lazily
    none, flat, ghost = (count_operations(method.step) for method in methods)
    assert floor(none, none) == 1.0
    assert 0.9 < floor(none, flat) <= 1.0  # the norms of vectors take little or nothing
    assert 0.4 < floor(none, ghost) < 0.9


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("stride", [1, 2])
def test_grouped_convolution_is_not_counted_as_a_dense_one(groups: int, stride: int) -> None:
    conv = torch.nn.Conv2d(16, 16, 3, stride=stride, padding=1, groups=groups)
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    forward = 2 * 2 * 16 * (16 // groups) * 9 * (8 // stride) ** 2
    assert count_operations(lambda: conv(x)) == forward
    assert count_operations(lambda: conv(x).sum().backward()) == 3 * forward
    assert count_operations(lambda: conv(x.detach()).sum().backward()) == 2 * forward


@torch.no_grad()
@pytest.mark.skipif(not matmul.has_onednn(), reason="this torch has no float32 products by oneDNN")
def test_onednn_products_are_counted(monkeypatch):
    monkeypatch.setattr(matmul, "LEAST", 0)
    monkeypatch.setattr(matmul, "_used", "onednn")
    x, weight = torch.randn(4, 6, 10), torch.randn(7, 10)
    assert count_operations(lambda: matmul.linear(x, weight)) == 2 * 4 * 6 * 10 * 7
