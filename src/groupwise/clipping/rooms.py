"""Working memory that the layers of one backward pass take over from each other.

On a CPU fresh memory is mapped page by page as it is first written, which can cost more than the arithmetic on it.
"""

from torch import Tensor


class Rooms:
    """One buffer for each purpose, grown to the largest that was asked for; empty again after `clear`."""

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
