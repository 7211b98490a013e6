"""Chooses the method that computes a layer's norms, by a cost model of its sizes.

One example's weight gradient is GᵀX for inputs X (T, d) and output gradients G (T, p) at T positions. There are two
methods for its norm:

| method | how | operations | memory |
|---|---|---|---|
| gram | ‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ) | 2T²(p + d) | T² |
| materialize | form GᵀX, a few examples at a time | 2T·p·d | p·d |

Gradients that were formed are reused for the clipped sum if that saves a product. A layer that is a group by itself
clips and sums them at once. In a larger group they are kept until the factors are known, if they are smaller than X and
G. Otherwise the clipped sum is one more product over the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Formula = Literal["auto", "gram", "materialize"]


@dataclass(frozen=True)
class Rates:
    """How much of each kind of work a device does per second."""

    product: float
    """Floating-point operations in one product over the whole batch; a multiply-add is two."""
    gram: float
    """Floating-point operations in T×T products, one per example."""
    outer: float
    """Floating-point operations in p×d products, one per example."""
    bytes: float
    """Bytes read or written."""
    starts: float
    """Operations (kernels) launched."""


RATES = {
    "cpu": Rates(product=9e10, gram=8e10, outer=7e10, bytes=1e10, starts=5e5),
    "cuda": Rates(product=2e13, gram=8e12, outer=8e12, bytes=1e12, starts=2e5),
    "cuda bfloat16": Rates(product=2e13, gram=8e12, outer=8e13, bytes=1e12, starts=2e5),
}
"""Rates of typical devices. They are fixed, so that a resumed run makes the same choices on any machine. With bfloat16
inputs and output gradients a convolution forms gradients in tensor cores, and everything else is in float32."""


SMALL = 1 << 14
"""Gradients up to this many entries are kept in any case."""


def are_kept(gradients: int, activations: int) -> bool:
    """Whether gradients are kept for the sum instead of the activations; both by their number of entries."""
    return gradients <= max(activations, SMALL)


MORE_STARTS = 8
"""How many more operations are launched by inner products and a product for the sum than by reused gradients."""


def seconds(
    rates: Rates, b: int, t: int, d: int, p: int, reused: bool, products: tuple[float, float] | None = None
) -> dict[str, float]:
    """Seconds for one example's norm and clipped sum, by method, for B examples and T, d and p as above.

    `reused`: the sum reuses gradients that were formed for the norms. For a convolution, d is the number of weights of
    one filter, and `products` the operations and entries written for XXᵀ, as X itself is never formed.
    """
    work, written = products or (2.0 * t * t * d, 2.0 * t * t)
    scaled = 8.0 * t * min(d, p)
    product = 2.0 * t * d * p / rates.product + scaled / rates.bytes
    gram = (work + 2.0 * t * t * p) / rates.gram + 4.0 * (written + 4.0 * t * t) / rates.bytes
    formed = 2.0 * t * d * p / rates.outer + (12.0 if reused else 8.0) * d * p / rates.bytes
    if reused:
        return {"gram": gram + product + MORE_STARTS / rates.starts / max(1, b), "materialize": formed}
    return {"gram": gram + product, "materialize": formed + product}


@dataclass
class NormMethods:
    """Chooses the method of one layer, once for each input and output shape.

    `dataclasses.replace` makes one with the same settings for another layer, without its choices.
    """

    formula: Formula = "auto"
    """"auto", or the method to use wherever a layer has both."""
    rates: Rates | None = None
    """Of the device; None takes those of its type."""
    save_memory: bool = False
    """Keep no gradients for reuse (ghost clipping)."""
    own_group: bool = False
    """Clipped sums are formed together with the norms: the layer is a group by itself, and uses its parameters once."""
    chosen: dict[tuple[Any, ...], str] = field(default_factory=dict, init=False)
    """The method, by shapes."""
    costs: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict, init=False)
    """Estimated seconds of each method, by shapes."""
    last: tuple[Any, ...] | None = field(default=None, init=False)
    """The shapes of the last call."""

    def reuses(self, gradients: int, activations: int) -> bool:
        """Whether the sum reuses gradients that were formed for the norms."""
        return not self.save_memory and (self.own_group or are_kept(gradients, activations))

    def choose(self, key: tuple[Any, ...], device: str, costs: Callable[..., dict[str, float]]) -> str:
        """The method for a call with these shapes of the input and of the output.

        If they are new, `costs` gets the rates of the type of device, as in `RATES`, and the shapes; it returns
        `seconds`.
        """
        self.last = key
        method = self.chosen.get(key)
        if method is None:
            found = self.costs[key] = costs(self.rates or RATES.get(device, RATES["cuda"]), *key)
            method = self.chosen[key] = self.formula if self.formula in found else min(found, key=found.__getitem__)
        return method
