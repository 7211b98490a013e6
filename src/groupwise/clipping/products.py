"""Inner products between the rows of one example, kept for the next layer that reads the same input."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_SPLIT = 1 << 22
"""Products (B·T·d times T) from which a processor gains by leaving out a quarter of a symmetric matrix."""


LONGEST_SUM = 1024
"""Numbers of two rows that are multiplied and added up in one go. A library may add them up one after the other, which
can lose more of a long sum than `rounding_slack` allows for."""


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """ABᵀ (B, T, S) of a (B, T, d) and b (B, S, d), long rows a part at a time."""
    if a.shape[2] <= LONGEST_SUM:
        return torch.bmm(a, b.mT)
    parts = zip(a.split(LONGEST_SUM, 2), b.split(LONGEST_SUM, 2), strict=True)
    first, other = next(parts)
    products = torch.bmm(first, other.mT)
    for part, other in parts:
        torch.baddbmm(products, part, other.mT, out=products)
    return products


def self_products(x: Tensor) -> Tensor:
    """XXᵀ (B, T, T) of x (B, T, d); on a CPU the upper right quarter is copied from the lower left."""
    rows = x.shape[1]
    if x.device.type != "cpu" or rows < 32 or x.numel() * rows < LEAST_SPLIT:
        return inner_products(x, x)
    half = rows // 2
    products = x.new_empty(x.shape[0], rows, rows)
    products[:, half:] = inner_products(x[:, half:], x)
    products[:, :half, :half] = inner_products(x[:, :half], x[:, :half])
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
