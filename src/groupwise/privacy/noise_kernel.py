"""Compiles the draws of counted noise into one kernel of a GPU; plain operations pass over memory a hundred times.

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
T gaussian(T place, T stream, T std, T third, T fourth, T first_key, T second_key, T single) {
  unsigned long long entry = (unsigned long long)place;
  unsigned int c0 = (unsigned int)(entry / 2), c1 = (unsigned int)stream;
  unsigned int c2 = (unsigned int)third, c3 = (unsigned int)fourth;
  unsigned int k0 = (unsigned int)first_key, k1 = (unsigned int)second_key;
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
  return single != 0 ? (T)((float)normal * (float)std) : (T)(normal * std);
}
"""
"""Entry `place` of a stream, times std: rounded as float32 numbers are if `single` is not 0. T is double."""
WORDS = ("third", "fourth", "first_key", "second_key", "single")


class NoiseKernel(NamedTuple):
    """The same kernel with two kinds of arguments; both give float64 numbers of their tensors' shape (n,)."""

    alone: Callable[..., Tensor]
    """(places) of one stream; the numbers stream, std and `WORDS` by name."""
    together: Callable[..., Tensor]
    """(places, streams, stds), (n,) float64 each; the numbers `WORDS` by name."""


def compile_kernel(device: torch.device, agrees: Callable[[NoiseKernel], bool]) -> NoiseKernel | None:
    """The kernel for a device, or None where there is no compiler for it or its draws do not agree with others.

    Args:
        device: where the tensors are.
        agrees: runs it on a few places, and says whether these are the draws of plain operations.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    numbers = dict.fromkeys(WORDS, 0.0)
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
