"""Counts what the arithmetic alone would allow: operations of plain training over those of a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count


def count_operations(step: Callable[[], None]) -> int:
    """Floating-point operations of one step's matrix products, convolutions and attention; nothing elementwise."""
    corrected = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=corrected) as counter:
        step()
    return counter.get_total_flops()


def _convolution_backward(
    output_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
    **_: Any,
) -> int:
    """As many as forward for each gradient, of input and of weight.

    torch's own count takes a grouped convolution's weight gradient for that of a dense one; functorch makes one group
    of every example, so a peer's operations would come out a batch size too many.
    """
    forward = conv_flop_count(list(input_shape), list(weight_shape), list(output_shape), transposed)
    return forward * (bool(wanted[0]) + bool(wanted[1]))


def floor(plain: float | None, method: float | None) -> float | None:
    """The ratio to plain training that a method would have if time were operations; None where one is not counted."""
    return plain / method if plain and method else None
