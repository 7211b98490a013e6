"""Sets the precision of float32 products on a GPU, independently of torch's own settings.

NVIDIA's GPUs since 2020 can compute float32 products and convolutions in TF32, which keeps 10 bits of each factor, and
torch allows that in cuDNN by default. A clipped sum is another product than the norm: in TF32 it may exceed the
threshold by a relative 1e-3, which the noise does not cover. So norms and sums are float32.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from groupwise.clipping.precision import kept_precisions

PLACES: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Inside, allow or forbid TF32 in float32 products and convolutions on a GPU; restores the settings."""
    before = [place.allow_tf32 for place in PLACES]
    with kept_precisions():  # which setting `allow_tf32`, and setting it back, both change
        for place in PLACES:
            place.allow_tf32 = tf32
        try:
            yield
        finally:
            for place, value in zip(PLACES, before, strict=True):
                place.allow_tf32 = value


@contextmanager
def arithmetic(device: torch.device, deterministic: bool = False) -> Iterator[None]:
    """The settings of a run: no TF32 unless its `train.precision` is tf32, and bfloat16 products summed in float32.

    Args:
        deterministic: the same bits each time on one model of GPU: deterministic algorithms of torch and cuDNN, and a
            fixed order of sums in cuBLAS. For that an environment variable is set, which should happen before the first
            product. Slower; torch raises RuntimeError at an operation that has no deterministic algorithm.
    """
    if device.type == "cpu":  # where sums have one order
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.are_deterministic_algorithms_enabled()
    matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which cuBLAS adds up in one order
        torch.use_deterministic_algorithms(True)
    try:
        with products(tf32=False):
            yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0]
        torch.use_deterministic_algorithms(before[1])
