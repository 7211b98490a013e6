"""GroupNorm's kernels, run by Triton's interpreter and compiled for GPUs that are not here (`make test-kernels`)."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.rules import group_norm
from tests.clipping.traced import clip_batch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="only in a process that begins with TRITON_INTERPRET=1, since Triton reads it once: make test-kernels",
)
SHAPES = [(3, 64, 8, 8, 16), (2, 16, 5, 7, 16), (2, 32, 6, 6, 4), (4, 16, 4, 4, 1), (1, 4, 1, 1, 2), (2, 6, 3, 3, 3)]
"""B, C, H, W and groups."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The module, for the interpreter."""
    from groupwise.clipping.rules import group_norm_kernels

    return group_norm_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_the_gradients_in_float64(
    kernels: Any, shape: tuple[int, ...], affine: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    b, c, h, w, groups = shape
    x, g = ((torch.randn(b, c, h, w) * 2 + 1).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = (torch.randn(c), torch.randn(c)) if affine else (None, None)
    y, mean, rstd = kernels.forward(x, weight, bias, groups, 1e-5)
    gx, weights, biases = kernels.backward(x, g, weight, mean, rstd, True)
    none, *same = kernels.backward(x, g, weight, mean, rstd, False)
    assert none is None and torch.equal(same[0], weights) and torch.equal(same[1], biases)
    true = x.double().requires_grad_()
    each = [(t if affine else fill).double().expand(b, c).clone().requires_grad_()
            for t, fill in ((weight, torch.ones(c)), (bias, torch.zeros(c)))]  # fmt: skip
    found = nn.functional.group_norm(true, groups, eps=1e-5) * each[0][:, :, None, None] + each[1][:, :, None, None]
    expected = torch.autograd.grad(found, (true, *each), g.double())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.05}
    torch.testing.assert_close(y.double(), found.detach(), **close)
    torch.testing.assert_close(gx.double(), expected[0], **close)
    for one, other in zip((weights, biases), expected[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert gx.is_contiguous(memory_format=torch.channels_last) and gx.dtype == y.dtype == dtype


def test_what_is_too_large_or_uneven_is_left_to_the_formulas(kernels: Any) -> None:
    def of(c: int, side: int, groups: int, dtype: torch.dtype = torch.float32) -> Any:
        return kernels.tile(torch.empty(2, c, side, side, dtype=dtype), groups)

    assert of(64, 32, 16) == (1024, 8) and of(128, 16, 16) == (256, 8) and of(256, 8, 16, torch.bfloat16) == (64, 16)
    assert of(64, 32, 1) is None and of(12, 8, 4) is None and of(64, 32, 16, torch.float64) is None
    assert kernels.tile(torch.empty(0, 64, 4, 4), 16) is None


@pytest.mark.parametrize("scale", [1e14, 3e15, 3e19, 3e35])
def test_what_has_no_square_in_float32_is_normalised_all_the_same(kernels: Any, scale: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last) * scale
    y, _, rstd = kernels.forward(x, None, None, 4, 1e-5)
    torch.testing.assert_close(y.double(), nn.functional.group_norm(x.double(), 4), rtol=1e-5, atol=1e-5)
    assert rstd.isfinite().all() and (rstd > 0).all()


def test_weights_need_not_lie_side_by_side(kernels: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    apart, expanded = torch.randn(16, 3)[:, 0], torch.randn(1).expand(16)
    for one in (apart, expanded):
        found, known = (kernels.forward(x, weight, weight, 4, 1e-5) for weight in (one, one.contiguous()))
        assert torch.equal(found[0], known[0])
        found, known = (kernels.backward(x, x, weight, *known[1:], True) for weight in (one, one.contiguous()))
        assert torch.equal(found[0], known[0])


def test_they_are_compared_before_they_are_used(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert group_norm.agrees(kernels, here) and group_norm.kernels_of(here) is None
    right = kernels.backward

    def wrong(*given: Any) -> Any:
        gx, weights, biases = right(*given)
        return gx, weights, biases * 1.01

    monkeypatch.setattr(kernels, "backward", wrong)
    assert not group_norm.agrees(kernels, here)


@pytest.mark.parametrize("partition", [flat, per_layer])
def test_clipped_sums_are_those_of_the_formulas(kernels: Any, partition: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "in_one_piece", lambda x: True)

    def sums() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.GroupNorm(2, 8)
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        x = torch.randn(5, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        with attach(model, partition(model), 0.5) as engine:
            clip_batch(engine, lambda x: model(x).flatten(1).pow(3).sum(1), x)
        return [parameter.grad for parameter in model.parameters()]

    plain, used = sums(), []
    monkeypatch.setattr(group_norm, "kernels_of", lambda device: used.append(device) or kernels)
    torch.testing.assert_close(sums(), plain, rtol=1e-4, atol=1e-6)
    assert used


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_a_gpu(capability: int, tmp_path: Any) -> None:
    """In a process of its own, as this one has the interpreter's."""
    import subprocess
    import sys

    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-c", COMPILE, str(capability)], env=environment, check=True, timeout=300)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from groupwise.clipping.rules import group_norm_kernels as kernels

tensors = {name: "*fp32" for name in "x g weight bias y means rstds gx weights biases".split()}
scalars = {"space": "i32", "c": "i32", "eps": "fp32"}
for kernel in (kernels._forward, kernels._backward):
    for dtype in ("*fp32", "*bf16"):
        constants = {"WIDTH": 4, "POSITIONS": 1024, "CHANNELS": 8}
        constants |= {name: True for name in ("HAS_WEIGHT", "HAS_BIAS", "NEEDS_INPUT") if name in kernel.arg_names}
        known = {**tensors, **scalars, **dict.fromkeys("xyg", dtype), "gx": dtype}
        signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=target, options={"num_warps": 8}).asm["cubin"]
"""
