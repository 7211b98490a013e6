"""Compiles a release's noise into one kernel of a GPU; plain operations pass over memory a hundred times.

The compiler is torch's own for elementwise kernels (`torch.cuda.jiterator`), which comes with torch for CUDA. The
source is plain C++ as well, so that tests compile it for a CPU. It holds nothing secret: key and counter are arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
