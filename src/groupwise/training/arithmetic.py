"""Sets the precision of float32 products on a GPU, independently of torch's own settings.

NVIDIA GPUs since 2020 can compute float32 products and convolutions in TF32, which keeps 10 bits of each factor. Torch
allows this in cuDNN by default. Norms and clipped sums come from different products, so in TF32 a clipped gradient may
exceed its threshold by a relative 1e-3, which the noise does not cover. Both are therefore computed in float32.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from groupwise.clipping.precision import with_tf32


@contextmanager
def arithmetic(device: torch.device, deterministic: bool = False) -> Iterator[None]:
    """Set the precision of a run on a GPU: forbid TF32, and sum bfloat16 products in float32; restored at the end.

    Args:
        device: the device of the run; nothing is set for a CPU.
        deterministic: use deterministic algorithms of torch, cuDNN and cuBLAS, so that a run repeats bit for bit on
            the same model of GPU. This is slower. Torch raises RuntimeError for an operation that has none. It sets
            CUBLAS_WORKSPACE_CONFIG, so use it before the first product.
    """
    if device.type == "cpu":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.are_deterministic_algorithms_enabled()
    matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS add in a fixed order
        torch.use_deterministic_algorithms(True)
    try:
        with with_tf32(False):
            yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0]
        torch.use_deterministic_algorithms(before[1])
