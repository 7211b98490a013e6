"""Peak bytes: what is held before the step counts, and what the step holds at once."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.meters import peak_bytes

MEGABYTE = 1 << 20


def make(sizes: list[int], held: list[int]) -> Callable[[], Callable[[], None]]:
    """A step that allocates `sizes` megabytes one after the other, beside `held` megabytes that stay."""

    def build() -> Callable[[], None]:
        kept = [torch.empty(size * MEGABYTE, dtype=torch.uint8) for size in held]

        def step() -> None:
            assert kept is not None
            for size in sizes:
                torch.empty(size * MEGABYTE, dtype=torch.uint8)

        return step

    return build


@pytest.mark.parametrize(("sizes", "held", "megabytes"), [([8, 2], [4], 12), ([1, 1], [4, 4], 9), ([], [3], 3)])
def test_the_peak_is_what_is_held_at_once(sizes: list[int], held: list[int], megabytes: int) -> None:
    peak, _ = peak_bytes(make(sizes, held), "cpu")
    assert peak == pytest.approx(megabytes * MEGABYTE, rel=1e-3)


def test_only_the_second_step_is_looked_at() -> None:
    sizes = iter([16, 2])

    def step() -> None:
        torch.empty(next(sizes) * MEGABYTE, dtype=torch.uint8)

    peak, _ = peak_bytes(lambda: step, "cpu")
    assert peak == pytest.approx(2 * MEGABYTE, rel=1e-3)
