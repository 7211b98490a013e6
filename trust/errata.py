"""Computes the numbers of docs/errata.md, ε under other readings of the paper:  python -m trust.errata

It takes two minutes. Each line is a case, at the σ that this project uses for the claimed ε, and its ε.
"""

from collections.abc import Iterator

from groupwise.privacy.accountants import best_run_epsilon, epsilon_rdp
from groupwise.privacy.accounting import epsilon_prv

Cell = tuple[float, float, int, float]
"""σ, sampling rate, steps, δ."""
CIFAR: dict[int, Cell] = {3: (6.957, 0.08192, 3662, 1e-5), 8: (3.074, 0.08192, 3662, 1e-5)}
SST2: dict[int, Cell] = {3: (1.0774, 0.015204, 1315, 4.885e-6), 8: (0.7059, 0.015204, 1315, 4.885e-6)}
"""Claimed ε -> its cell."""
SAMSUM: Cell = (1.327, 256 / 14732, 288, 14732**-1.1)
E2E = (1.0201, 0.6800)
"""σ for 3 and for 8."""


def prv(sigma: float, rate: float, steps: int, delta: float) -> str:
    """The estimate of ε by PRV, to two decimals."""
    return f"{epsilon_prv(sigma, rate, steps, delta).estimate:.2f}"


def sizes() -> Iterator[str]:
    """The lines, in the order of the page's table."""
    for name, cells, shares, runs in (("SST-2", SST2, (0.01, 0.1, 0.2), 27), ("CIFAR-10", CIFAR, (0.01,), 6)):
        for claimed, (sigma, rate, steps, delta) in cells.items():
            raw = [prv(sigma / (1 + 3 * r) ** 0.5, rate, steps, delta) for r in shares]
            yield f"raw counts, {name}, claimed {claimed}: {' '.join(raw)}"
            yield f"RDP, {name}, claimed {claimed}: {epsilon_rdp(sigma, rate, steps, delta):.2f}"
            yield f"all {runs} runs of the grid, {name}, claimed {claimed}: {prv(sigma, rate, steps * runs, delta)}"
            best = best_run_epsilon(sigma, rate, steps, delta, runs)
            yield f"best of {runs} expected runs, {name}, {claimed}: {best:.2f}"
    for sigma, rate, steps, delta in SST2.values():
        apart = (prv(sigma / share**0.5, rate, steps, delta) for share in (0.9, 0.1))
        yield f"r = 0.1, gradients alone, counts alone: {' '.join(apart)}"
    yield f"replace-one, CIFAR-10: {' '.join(prv(cell[0] / 2, *cell[1:]) for cell in CIFAR.values())}"
    for steps in (3600, 3900):
        yield f"T = {steps}: {' '.join(prv(cell[0], cell[1], steps, cell[3]) for cell in CIFAR.values())}"
    sigma, rate, steps, delta = SAMSUM
    for groups in (2, 4, 16):
        yield f"per-device, sigma C_k, K = {groups}: {prv(sigma / groups**0.5, rate, steps, delta)}"
    for batch in (64, 128, 512):
        yield f"SAMSum, B = {batch}: {prv(sigma, batch / 14732, round(5 * 14732 / batch), delta)}"
    yield f"SAMSum, delta = 1e-5: {prv(sigma, rate, steps, 1e-5)}"
    yield f"E2E, delta = 1e-5: {' '.join(prv(sigma, 0.023775, 421, 1e-5) for sigma in E2E)}"


if __name__ == "__main__":
    for line in sizes():
        print(line)
