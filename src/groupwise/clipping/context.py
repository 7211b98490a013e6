"""Tells a rule what it may use beside the call itself: its layer's choices, working memory, the last inner products.

Rules hold nothing but their module; everything that depends on the engine, or lasts longer than a call, is in the
`RuleContext` that their methods are given.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from groupwise.clipping.cost_model import Choices
from groupwise.clipping.gram import LastProducts


class BufferPool:
    """One buffer for each purpose, which the layers of a backward pass take over from each other.

    A buffer grows to the largest size that was asked for. On a CPU fresh memory is mapped page by page as it is first
    written, which can cost more than the arithmetic on it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, purpose: str, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised memory of a shape, with dtype and device of `like`, until the purpose is asked for again.

        Other devices than a CPU get fresh memory: their allocators keep it, and know about streams.
        """
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = 1
        for length in shape:
            size *= length
        key = (purpose, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = like.new_empty(size)
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


@dataclass(frozen=True)
class RuleContext:
    """What the rule of one layer works with; `RuleContext()` will do for a call outside of an engine."""

    own_group: bool = False
    """The layer is a group by itself, and each of its parameters is used once: clipped sums are fused with norms."""
    save_memory: bool = False
    """Nothing may be kept for the sake of speed (ghost clipping)."""
    choices: Choices = field(default_factory=Choices)
    """How the layer's norms are computed, decided once for each size."""
    buffers: BufferPool = field(default_factory=BufferPool)
    products: LastProducts = field(default_factory=LastProducts)

    def for_layer(self, own_group: bool = False) -> "RuleContext":
        """The context of another layer of the same engine: choices of its own, everything else shared."""
        return replace(self, own_group=own_group, choices=Choices(self.choices.formula, self.choices.rates))

    def clear(self) -> None:
        """Give back what a backward pass has left behind."""
        self.buffers.clear()
        self.products.clear()


def chunk_floats(like: Tensor) -> int:
    """Numbers that a chunk of materialised gradients may hold: about a core's cache, or enough to fill a GPU."""
    return 1 << 20 if like.device.type == "cpu" else 1 << 26
