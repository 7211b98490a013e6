"""Inner products between the rows of one example, kept for the next layer that reads the same input."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_SPLIT = 1 << 22
"""Products (B·T·d times T) from which a processor gains by leaving out a quarter of a symmetric matrix."""


def self_products(x: Tensor) -> Tensor:
    """XXᵀ (B, T, T) of x (B, T, d); on a CPU the upper right quarter is copied from the lower left."""
    rows = x.shape[1]
    if x.device.type != "cpu" or rows < 32 or x.numel() * rows < LEAST_SPLIT:
        return torch.bmm(x, x.mT)
    half = rows // 2
    products = x.new_empty(x.shape[0], rows, rows)
    products[:, half:] = torch.bmm(x[:, half:], x.mT)
    products[:, :half, :half] = torch.bmm(x[:, :half], x[:, :half].mT)
    products[:, :half, half:] = products[:, half:, :half].mT
    return products


class LastProducts:
    """XXᵀ of the last input asked for: layers that read the same input (query, key, value) share it."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._kept: tuple[StorageWeakRef, Tensor] | None = None
        self.reused = 0

    def of(self, x: Tensor) -> Tensor:
        """XXᵀ (B, T, T) of x (B, T, d); not to be changed."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        # The input itself is not kept alive; while it lives, no other tensor can have its address.
        if self._kept is not None and key == self._key and not self._kept[0].expired():
            self.reused += 1
            return self._kept[1]
        products = self_products(x)
        self._key, self._kept = key, (StorageWeakRef(x.untyped_storage()), products)
        return products

    def clear(self) -> None:
        """Let go of what is held."""
        self._key = self._kept = None
