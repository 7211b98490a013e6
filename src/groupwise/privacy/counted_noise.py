"""Draws Gaussian noise by counting: an entry is a function of (key, stream, its place), the same on every device.

A generator of a GPU hands its numbers out to as many threads as that model has, so another model draws other noise from
the same seed. Here the numbers come from Philox4x32-10 (Salmon et al., 2011), a keyed permutation of a counter of 128
bits, in whole numbers of torch: equal bits everywhere. Entries 2j and 2j + 1 of stream s are the Box-Muller pair of
the block (j, s, c2, c3), where c2, c3 and Philox's key of 64 bits are 128 secret bits. Radius and angle take 64 bits
each and are computed in float64, whose last bits may differ between devices: so a draw is the same up to about 1e-15,
and rounded to float32 it is the same number but once in some ten million times, when it differs by its last bit.
The radius ends at 9.5 standard deviations, which a Gaussian passes with a chance of 2e-21.

On a GPU one kernel does it all, where plain operations pass over memory a hundred times, if its draws agree with theirs
here. The compiler is torch's own for elementwise kernels (`torch.cuda.jiterator`), which comes with torch for CUDA. The
source is plain C++ as well, so that tests compile it for a CPU; it holds nothing secret: key and counter are arguments.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.errors import UserError

SOURCE = """
template <typename T>
T noisy(T place, T value, T stream, T std, T first_high, T first_low, T third_high, T third_low, T fourth_high,
        T fourth_low, T key_high, T key_low, T second_key_high, T second_key_low, T divisor, T single) {
  unsigned long long first = (unsigned long long)first_high * 65536ull + (unsigned long long)first_low;
  unsigned long long entry = first + (unsigned long long)place;
  unsigned int c0 = (unsigned int)(entry / 2), c1 = (unsigned int)(long long)stream;
  unsigned int c2 = (unsigned int)third_high * 65536u + (unsigned int)third_low;
  unsigned int c3 = (unsigned int)fourth_high * 65536u + (unsigned int)fourth_low;
  unsigned int k0 = (unsigned int)key_high * 65536u + (unsigned int)key_low;
  unsigned int k1 = (unsigned int)second_key_high * 65536u + (unsigned int)second_key_low;
  for (int round = 0; round != 10; ++round) {
    unsigned long long even = 0xD2511F53ull * c0, odd = 0xCD9E8D57ull * c2;
    c0 = (unsigned int)(odd >> 32) ^ c1 ^ k0;
    c1 = (unsigned int)odd;
    c2 = (unsigned int)(even >> 32) ^ c3 ^ k1;
    c3 = (unsigned int)even;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const double word = 2.3283064365386963e-10, pi = 3.141592653589793;
  double radius = ::sqrt(::log(c0 * word + (c1 + 0.5) * word * word) * -2.0);
  double angle = (c2 * word + c3 * word * word) * (2.0 * pi);
  double normal = radius * (entry % 2 ? ::sin(angle) : ::cos(angle));
  if (single == 0) return (T)(((double)value + normal * (double)std) / (double)divisor);
  float drawn = (float)((double)(float)normal * (double)(float)std);
  return (T)(((float)value + drawn) / (float)divisor);
}
"""
"""(value + std · the entry first + place of a stream) / divisor. T is float or double, and exact for places and streams
below 2²⁴ and for halves of words; `single` is 1 where sums are float32, and rounded as plain operations round them."""
FIRST = ("first_high", "first_low")
SECRET = tuple(f"{word}_{half}" for word in ("third", "fourth", "key", "second_key") for half in ("high", "low"))
NUMBERS = (*FIRST, *SECRET, "divisor", "single")


def halves(names: tuple[str, ...], *words: int) -> dict[str, float]:
    """Numbers as their upper part and their lower 16 bits, by name: a float32 holds each."""
    parts = (float(part) for word in words for part in (word >> 16, word & 0xFFFF))
    return dict(zip(names, parts, strict=True))


class NoiseKernel(NamedTuple):
    """The same kernel with two kinds of arguments; both give numbers of the shape and widest dtype of their tensors."""

    alone: Callable[..., Tensor]
    """(places, values), (n,) each, of one stream; the numbers stream, std and `NUMBERS` by name."""
    together: Callable[..., Tensor]
    """(places, values, streams, stds), (n,) each; the numbers `NUMBERS` by name."""


def compile_kernel(device: torch.device, agrees: Callable[[NoiseKernel], bool]) -> NoiseKernel | None:
    """The kernel for a device, or None where there is no compiler for it or its draws do not agree with others.

    Args:
        device: where the tensors are.
        agrees: runs it on a few places, and says whether these are the draws of plain operations.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    numbers = dict.fromkeys(NUMBERS, 0.0)
    try:
        make: Any = torch.cuda.jiterator._create_jit_fn
        made = NoiseKernel(make(SOURCE, stream=0.0, std=1.0, **numbers), make(SOURCE, **numbers))
        if agrees(made):
            return made
        reason = "its draws differ from those of plain operations"
    except (AttributeError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    warnings.warn(f"The noise kernel is not used, so noise takes longer to draw: {reason}.", stacklevel=2)
    return None


ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
CHUNK = 1 << 21
"""Entries that are drawn at once, from half as many blocks: about 100 bytes an entry while it lasts."""
KERNEL_CHUNK = 1 << 23
"""The same where one kernel draws them: 8 bytes an entry."""
KERNEL_FEW = 1 << 16
"""Entries of a tensor that is drawn with others even so: three kernels of its own would take longer."""
LARGEST = 1 << 33
"""Entries of a tensor: two for each value of the counter's first word."""
COUNTING = ("cpu", "cuda")
"""Devices that compute with int64 and float64; for others the noise is drawn on the CPU."""

Word = Tensor | int


def philox(counter: Sequence[Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of counters of four words, tensors of int64 in [0, 2³²) that broadcast, or numbers: four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((odd >> 32) ^ c1 ^ k0) & WORD, _low(odd), ((even >> 32) ^ c3 ^ k1) & WORD, _low(even)
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _low(product: Word) -> Word:
    """The lower word of a product, for a sum that is cut to 32 bits itself. In a tensor's int64 a product of two words
    wraps around: its 64 bits are right, and >> only repeats the highest. Numbers of Python know no end."""
    return product & WORD if isinstance(product, int) else product


class CountedNoise:
    """The noise of one step.

    Args:
        digest: at least 16 secret bytes, of this step alone.
    """

    def __init__(self, digest: bytes) -> None:
        words = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
        self._key, self._secret = (words[0], words[1]), (words[2], words[3])
        self._counted: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def normals(self, blocks: Tensor, streams: Word) -> Tensor:
        """The pairs of blocks (n,), int64 in [0, 2³²), of streams that are alike or one number: (2n,) float64."""
        first, second, third, fourth = philox((blocks, streams, *self._secret), self._key)
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        assert isinstance(third, Tensor) and isinstance(fourth, Tensor)
        radius = (first.double() * 2.0**-32).add_(second.double().add_(0.5), alpha=2.0**-64)
        radius = radius.log_().mul_(-2.0).sqrt_()  # of a number in (0, 1]: at most 9.5
        angle = (third.double() * 2.0**-32).add_(fourth.double(), alpha=2.0**-64).mul_(2.0 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()

    def adder(self, like: Tensor, std: float, stream: int, divisor: float = 1.0) -> Callable[[Tensor], object]:
        """Adds the stream's next entries, times `std`, to the parts of one tensor that it is given in row-major order,
        and divides the sums by `divisor`.

        Raises:
            UserError: the tensor has more entries than the counter has places.
        """
        if like.numel() > LARGEST:
            raise UserError(f"noise was asked for on {like.numel()} entries at once; give at most 2^33.")
        begun, kernel = 0, kernel_of(like.device)

        def add(part: Tensor) -> None:
            nonlocal begun
            first, begun = begun, begun + part.numel()
            if kernel is not None:
                numbers = {"stream": float(stream), "std": std} | self._numbers(part.dtype, divisor, first)
                part.copy_(kernel.alone(self._places(part), part.reshape(-1), **numbers).view(part.shape))
                return
            where = part.device if part.device.type in COUNTING else torch.device("cpu")
            blocks = torch.arange(first // 2, (begun + 1) // 2, device=where)
            drawn = self.normals(blocks, stream & WORD)[first % 2 :][: part.numel()]
            part.add_(drawn.to(part.device, part.dtype).mul_(std).view(part.shape)).div_(divisor)

        return add

    @torch.no_grad()
    def add_together_(
        self, tensors: Sequence[Tensor], stds: Sequence[float], streams: Sequence[int], divisor: float = 1.0
    ) -> None:
        """The same for whole tensors of one device and dtype, in one draw, as few kernels; `CHUNK` entries in all."""
        device, dtype = tensors[0].device, tensors[0].dtype
        kernel = kernel_of(device)
        if kernel is not None:
            torch._foreach_copy_(list(tensors), self._noised_together(kernel, tensors, stds, streams, divisor))
            return
        blocks = [(tensor.numel() + 1) // 2 for tensor in tensors]
        where = device if device.type in COUNTING else torch.device("cpu")
        firsts = [0, *accumulate(blocks)]
        table = torch.tensor([blocks, [stream & WORD for stream in streams], firsts[:-1]], dtype=torch.int64)
        lengths, words, starts = table.to(where, non_blocking=True).unbind()
        own = torch.repeat_interleave(torch.stack((words, starts)), lengths, dim=1, output_size=firsts[-1])
        drawn = self.normals(torch.arange(firsts[-1], device=where) - own[1], own[0]).to(device, dtype)
        noises = [
            drawn[2 * first : 2 * first + tensor.numel()].view(tensor.shape)
            for tensor, first in zip(tensors, firsts, strict=False)
        ]
        torch._foreach_mul_(noises, list(stds))
        torch._foreach_add_(list(tensors), noises)
        torch._foreach_div_(list(tensors), divisor)

    def _noised_together(
        self,
        kernel: NoiseKernel,
        tensors: Sequence[Tensor],
        stds: Sequence[float],
        streams: Sequence[int],
        divisor: float,
    ) -> list[Tensor]:
        """Each tensor with its noise, by one kernel."""
        device, dtype, sizes = tensors[0].device, tensors[0].dtype, [tensor.numel() for tensor in tensors]
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        table = torch.tensor([sizes, starts, streams, stds], dtype=torch.float64).to(device, non_blocking=True)
        own = torch.repeat_interleave(table[1:], table[0].long(), dim=1, output_size=ends[-1])
        places = torch.arange(ends[-1], dtype=torch.float64, device=device).sub_(own[0])
        values = torch.cat([tensor.reshape(-1) for tensor in tensors])
        noised = kernel.together(places, values, own[1], own[2], **self._numbers(dtype, divisor))
        return [part.view(tensor.shape) for part, tensor in zip(noised.split(sizes), tensors, strict=True)]

    def _numbers(self, dtype: torch.dtype, divisor: float, first: int = 0) -> dict[str, float]:
        """What the kernel takes by name."""
        secret = halves(SECRET, *self._secret, *self._key)
        return halves(FIRST, first) | secret | {"divisor": divisor, "single": float(dtype == torch.float32)}

    def _places(self, like: Tensor) -> Tensor:
        """0, 1, … for the entries of a part, in its dtype and on its device; the longest is kept for other tensors."""
        kept = self._counted.get(kind := (like.dtype, like.device))
        if kept is None or len(kept) < like.numel():
            kept = self._counted[kind] = torch.arange(like.numel(), dtype=like.dtype, device=like.device)
        return kept[: like.numel()]


@lru_cache
def kernel_of(device: torch.device) -> NoiseKernel | None:
    """The kernel for a device's draws, compiled when it is first asked for; None: they take plain operations."""

    def agrees(kernel: NoiseKernel) -> bool:
        noise, first = CountedNoise(bytes(range(1, 17))), 2**33 - 99
        places = torch.arange(64, dtype=torch.float32, device=device)
        values = places.double() / 3
        blocks = torch.arange(first // 2, first // 2 + 33, device=device)
        expected = (values + noise.normals(blocks, 3)[1:65] * 1.5) / 7
        alone = kernel.alone(places, values, stream=3.0, std=1.5, **noise._numbers(torch.float64, 7.0, first))
        single = kernel.alone(places, values.float(), stream=3.0, std=1.5, **noise._numbers(torch.float32, 7.0, first))
        numbers = noise._numbers(torch.float32, 7.0, first)
        both = kernel.together(places, values.float(), torch.full_like(values, 3), values * 0 + 1.5, **numbers)
        rounded = all(torch.allclose(each.double(), expected, 0, 1e-6) for each in (single, both))
        return rounded and torch.allclose(alone, expected, 0, 1e-12)

    return compile_kernel(device, agrees)


def chunk_on(device: torch.device) -> int:
    """Entries of one tensor that are drawn at once."""
    return CHUNK if kernel_of(device) is None else KERNEL_CHUNK


def few_on(device: torch.device) -> int:
    """Entries of a tensor up to which it is drawn together with others."""
    return CHUNK if kernel_of(device) is None else KERNEL_FEW


def batches(sizes: Sequence[int], few: int = CHUNK, most: int = CHUNK) -> Iterator[list[int]]:
    """Places of tensors that are drawn together: of at most `few` entries each, `most` in all; a larger one is alone,
    and comes as soon as it is met."""
    held: list[int] = []
    room = most
    for place, size in enumerate(sizes):
        if size > few:
            yield [place]
            continue
        if held and size > room:
            yield held
            held, room = [], most
        held.append(place)
        room -= size
    if held:
        yield held
