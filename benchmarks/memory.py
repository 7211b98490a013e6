"""Peak bytes of a training step: what the allocator of torch held at most, weights and gradients included."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Step = Callable[[], None]
_MARK, _MEMORY = "benchmarks: the measured step", "[memory]"


def peak_bytes(make: Callable[[], Step], device: str) -> tuple[int, Step]:
    """Make a step, run it twice and return the most bytes that were allocated during the second, and the step.

    Args:
        make: builds the model and everything that the step needs, so that all of it counts.
        device: "cpu": from the profiler's events (allocations by torch; what numpy or MKL hold by themselves is not
            seen); "cuda": the allocator's own peak.
    """
    return _cuda(make) if device == "cuda" else _cpu(make)


def _cuda(make: Callable[[], Step]) -> tuple[int, Step]:
    step = make()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), step


def _cpu(make: Callable[[], Step]) -> tuple[int, Step]:
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
