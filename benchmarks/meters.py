"""Measures a step: its time, its peak memory, and its floating-point operations."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from groupwise.clipping.matmul import has_onednn


@dataclass(frozen=True)
class Seconds:
    """CPU time of the process and wall time of one step; on a GPU the wall time lies between two events."""

    cpu: float
    wall: float


Step = Callable[[], object]


def timed(step: Step, steps: int, device: torch.device | str) -> Seconds:
    """Seconds a step, from `steps` steps in a row."""
    begin = end = None
    if torch.device(device).type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    if begin is not None:
        begin.record()
    for _ in range(steps):
        step()
    if begin is None or end is None:
        taken = time.perf_counter() - wall
    else:
        end.record()
        torch.cuda.synchronize()
        taken = begin.elapsed_time(end) / 1000
    return Seconds((time.process_time() - cpu) / steps, taken / steps)


_MARK, _MEMORY = "benchmarks: the measured step", "[memory]"


def peak_bytes(make: Callable[[], Step], device: str) -> tuple[int, Step]:
    """Make a step, run it twice, and return the peak of allocated bytes during the second run, and the step.

    Args:
        make: builds the model and everything that the step needs, so that all of it counts.
        device: "cpu": from the profiler's events (allocations by torch; memory that numpy or MKL allocate is
            not seen); "cuda": the allocator's own peak.
    """
    return _cuda(make) if device == "cuda" else _cpu(make)


def free_memory(device: str, workspaces: bool = False) -> None:
    """Free what nothing uses; `workspaces`: those of cuBLAS too, which no CUDA graph that is still launched may use."""
    gc.collect()
    if device == "cuda":
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _cuda(make: Callable[[], Step]) -> tuple[int, Step]:
    free_memory("cuda", workspaces=True)
    step = make()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), step


def _cpu(make: Callable[[], Step]) -> tuple[int, Step]:
    gc.collect()  # older objects that are freed during the profile would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step = make()
        step()
        with record_function(_MARK):
            step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    return _peak(profiler.profiler.kineto_results.events()), step


def _peak(events: list[Any]) -> int:
    """The highest running sum of allocated minus freed bytes from the mark's beginning to its end."""
    mark = next(event for event in events if event.name() == _MARK)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == _MEMORY)
    held = list(accumulate(size for _, size in changes))
    times = [time for time, _ in changes]
    before = [size for time, size in zip(times, held, strict=True) if time < mark.start_ns()][-1:]
    during = [size for time, size in zip(times, held, strict=True) if mark.start_ns() <= time <= mark.end_ns()]
    return max(before + during)


def count_operations(step: Step) -> int:
    """Floating-point operations of one step's matrix products, convolutions and attention; nothing elementwise."""
    corrected: dict[Any, Any] = {torch.ops.aten.convolution_backward: _convolution_backward}
    if has_onednn():
        corrected[torch.ops.mkldnn._linear_pointwise] = _linear_pointwise
    with FlopCounterMode(display=False, custom_mapping=corrected) as counter:
        step()
    return counter.get_total_flops()


def _linear_pointwise(input_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(input_shape) * weight_shape[0]


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
    """As many operations as forward for each gradient, of input and of weight.

    torch's own formula counts the weight gradient of a grouped convolution as that of a dense one; functorch makes one
    group of every example, so the count of a peer would be too large by a factor of the batch size.
    """
    forward = conv_flop_count(list(input_shape), list(weight_shape), list(output_shape), transposed)
    return forward * (bool(wanted[0]) + bool(wanted[1]))


def floor(plain: float | None, method: float | None) -> float | None:
    """Operations of plain training over those of a method, the ratio that arithmetic alone allows; None if unknown."""
    return plain / method if plain and method else None
