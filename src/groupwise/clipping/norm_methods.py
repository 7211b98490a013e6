"""Chooses how a layer's norms are found, by one function of its sizes.

One example's weight gradient is GᵀX for inputs X (T, d) and output gradients G (T, p), T positions. There are two
methods for its norm:

| method | how | operations | memory |
|---|---|---|---|
| gram | ‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ) | 2T²(p + d) | T² |
| materialize | form GᵀX, a few examples at a time | 2T·p·d | p·d |

Gradients that were formed are used again where that saves a product: in a group of its own a layer weighs and adds them
up at once; elsewhere they are kept until the group's factors are known, if they are smaller than X and G. Otherwise the
clipped sum is one more product over the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Formula = Literal["auto", "gram", "materialize"]


@dataclass(frozen=True)
class Rates:
    """How much of each kind of work a device does in a second."""

    product: float
    """Operations (a multiply-add is two) in one product over the whole batch."""
    gram: float
    """Operations in T×T products, one an example."""
    outer: float
    """Operations in p×d products, one an example."""
    bytes: float
    """Bytes written or read again."""
    starts: float
    """Operations started, however small."""


RATES = {
    "cpu": Rates(product=9e10, gram=8e10, outer=7e10, bytes=1e10, starts=5e5),
    "cuda": Rates(product=2e13, gram=8e12, outer=8e12, bytes=1e12, starts=2e5),
    "cuda bfloat16": Rates(product=2e13, gram=8e12, outer=8e13, bytes=1e12, starts=2e5),
}
"""Of usual machines, the same on all of them, so that a run makes the same choices wherever it is resumed. With inputs
and output gradients in bfloat16 a convolution forms gradients in tensor cores, and the rest in float32."""


SMALL = 1 << 14
"""Numbers that are kept whatever is freed for them."""


def are_kept(gradients: int, activations: int) -> bool:
    """Whether so many numbers of gradients are kept for the sum, in the place of what they were formed from."""
    return gradients <= max(activations, SMALL)


MORE_STARTS = 8
"""Operations that inner products and a product for the sum take more than gradients that are used again."""


@dataclass(frozen=True)
class Sizes:
    """What the cost of a layer's norms depends on."""

    examples: int
    """B."""
    positions: int
    """T."""
    inputs: int
    """d, or the weights of one filter of a convolution."""
    outputs: int
    """p."""
    reused: bool
    """Gradients that were formed serve for the sum, too."""
    products: tuple[float, float] | None = None
    """Operations for XXᵀ and numbers written for it, where X is not at hand (a convolution's is not)."""


def seconds(sizes: Sizes, rates: Rates) -> dict[str, float]:
    """Time for one example's norm and clipped sum by each method."""
    t, d, p = sizes.positions, sizes.inputs, sizes.outputs
    work, written = sizes.products or (2.0 * t * t * d, 2.0 * t * t)
    scaled = 8.0 * t * min(d, p)
    product = 2.0 * t * d * p / rates.product + scaled / rates.bytes
    gram = (work + 2.0 * t * t * p) / rates.gram + 4.0 * (written + 4.0 * t * t) / rates.bytes
    formed = 2.0 * t * d * p / rates.outer + (12.0 if sizes.reused else 8.0) * d * p / rates.bytes
    if sizes.reused:
        return {"gram": gram + product + MORE_STARTS / rates.starts / max(1, sizes.examples), "materialize": formed}
    return {"gram": gram + product, "materialize": formed + product}


class NormMethods(dict[tuple[Any, ...], str]):
    """One layer's methods by its sizes, decided once for each.

    Args:
        formula: "auto", or the method to use wherever a layer has both.
        rates: of the device; None takes those of its kind.
        save_memory: nothing may be kept for the sake of speed (ghost clipping).
        own_group: the layer is a group by itself, and each of its parameters is used once: clipped sums are fused with
            norms.
    """

    def __init__(
        self,
        formula: Formula = "auto",
        rates: Rates | None = None,
        save_memory: bool = False,
        own_group: bool = False,
    ) -> None:
        super().__init__()
        self.formula, self.rates, self.save_memory, self.own_group = formula, rates, save_memory, own_group
        self.last: tuple[Any, ...] | None = None
        """The shapes of the last input and output that a method was asked for."""
        self.costs: dict[tuple[Any, ...], dict[str, float]] = {}
        """Seconds of each method, by sizes."""

    def for_layer(self, own_group: bool = False) -> "NormMethods":
        """Those of another layer of the same engine."""
        return NormMethods(self.formula, self.rates, self.save_memory, own_group)

    def reuses(self, gradients: int, activations: int) -> bool:
        """Whether gradients that were formed for norms serve for the sum, too."""
        return not self.save_memory and (self.own_group or are_kept(gradients, activations))

    def choose(self, key: tuple[Any, ...], device: str, sizes: Callable[[], Sizes]) -> str:
        """The method for a call.

        Args:
            key: shapes of the input and of the output.
            device: its kind, as in `RATES`.
            sizes: says them, where the key is new.
        """
        self.last = key
        method = self.get(key)
        if method is None:
            costs = self.costs[key] = seconds(sizes(), self.rates or RATES.get(device, RATES["cuda"]))
            method = self[key] = self.formula if self.formula in costs else min(costs, key=costs.__getitem__)
        return method
