"""Speed of a linear layer's matrix products by torch's default library and by oneDNN:  python -m benchmarks.matmul

GFlop/s on one thread (the best of several alternating runs), and the largest difference of the results, relative to
their largest number. `groupwise.clipping.matmul` uses oneDNN for at least `LEAST` operations, if it is faster here.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from groupwise.clipping import matmul

SIZES = (
    *((64, 100, 64), (128, 128, 128), (256, 784, 1024), (512, 768, 768), (512, 768, 3072), (512, 3072, 768)),
    *((2048, 384, 1536), (512, 768, 16)),
)
"""Rows, d, p."""
PER_EXAMPLE = ((16, 64, 768), (8, 100, 768), (16, 32, 384), (4, 512, 768))
"""B, T, d."""
ROUNDS = 15

Product = tuple[str, Callable[[], Tensor], int, int]
"""Name, function, operations (a multiply-add is two), and the number of products."""


def products() -> Iterator[Product]:
    """The products that are measured."""
    for n, d, p in SIZES:
        x, w, g, bias = torch.randn(n, d), torch.randn(p, d), torch.randn(n, p), torch.randn(p)
        yield f"x Wᵀ + b ({n}, {d}, {p})", partial(matmul.linear, x, w, bias), 2 * n * d * p, 1
        yield f"g W ({n}, {d}, {p})", partial(matmul.product, g, w), 2 * n * d * p, 1
        yield f"gᵀ x ({n}, {d}, {p})", partial(matmul.product, g.t(), x), 2 * n * d * p, 1
    for batch, t, d in PER_EXAMPLE:
        x = torch.randn(batch, t, d)
        yield f"X Xᵀ ({batch} of {t}, {d})", partial(matmul.batched, x, x.mT), 2 * batch * t * t * d, batch


def measured(product: Callable[[], Tensor], operations: int) -> tuple[list[float], float]:
    """GFlop/s by each library, and the largest relative difference of their results."""
    best, results = [float("inf")] * 2, [torch.empty(0)] * 2
    for _ in range(ROUNDS):
        for i, library in enumerate(matmul.LIBRARIES):
            matmul.use(library)
            start = time.perf_counter()
            results[i] = product()
            best[i] = min(best[i], time.perf_counter() - start)
    one, other = results
    return [operations / seconds / 1e9 for seconds in best], float((one - other).abs().max() / one.abs().max())


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    least, matmul.LEAST, faster = matmul.LEAST, 0, matmul.faster()
    print(f"faster here: {faster}\n\n| product | torch | oneDNN | difference | taken |\n|---|---|---|---|---|")
    for name, product, operations, count in products():
        (plain, onednn), difference = measured(product, operations)
        taken = faster if operations >= least * count else "torch"
        print(f"| {name} | {plain:.0f} | {onednn:.0f} | {difference:.0e} | {taken} |", flush=True)
    matmul.LEAST = least
    matmul.use("auto")


if __name__ == "__main__":
    main()
