"""Times one microbatch at one stage on this machine's CPU, from single blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from statistics import median

import torch

from groupwise.clipping import attach, flat
from groupwise.planner.accelerators import Seconds
from groupwise.planner.footprint import Kind, Passes, Work, cut_out, inputs
from groupwise.privacy import NoiseSource, release_gradients

REPEATS = 7
MIDDLE, MORE = Kind(1, False, False), 2


class Timed:
    """CPU seconds of one thread, the median of a few.

    Stages of one block and of three are timed; any stage is then its ends and as many blocks as it has.
    """

    def __init__(self, work: Work, repeats: int = REPEATS) -> None:
        self._work, self._repeats = work, repeats
        self._timed = lru_cache(self._time)

    def passes(self, kind: Kind, name: str) -> Seconds:
        """See `accelerators.Speed`."""
        ends = self._timed(replace(kind, blocks=1), name)
        if kind.blocks == 1:
            return ends
        one, three = self._timed(MIDDLE, name), self._timed(replace(MIDDLE, blocks=1 + MORE), name)
        more = (kind.blocks - 1) / MORE
        return Seconds(
            ends.forward + more * max(three.forward - one.forward, 0.0),
            ends.backward + more * max(three.backward - one.backward, 0.0),
        )

    def _time(self, kind: Kind, name: str) -> Seconds:
        stage = cut_out(self._work, kind, "cpu")
        passes = Passes(stage, self._work, name)
        x, kwargs = inputs(stage, self._work)
        found: list[tuple[float, float]] = []
        gradient = None
        for _ in range(1 + self._repeats):  # the first to warm up: it may choose formulas and fill caches
            start = time.process_time()
            out = passes.forward(x, kwargs)
            middle = time.process_time()
            if gradient is None and not stage.last:
                gradient = torch.randn_like(out)
            begin = time.process_time()
            passes.backward(out, gradient)
            end = time.process_time()
            x.grad = None
            found.append((middle - start, end - begin))
        forward, backward = zip(*found[1:], strict=True)
        return Seconds(median(forward), median(backward))

    def update(self, kind: Kind, *, noisy: bool) -> float:
        """See `accelerators.Speed`; in proportion to what one block's takes."""
        stage = cut_out(self._work, kind)
        numbers = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        return numbers * self._update(noisy)

    def _update(self, noisy: bool) -> float:
        """Seconds a trained number."""
        stage = cut_out(self._work, MIDDLE, "cpu")
        trained = [p for p in stage.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6)
        noise = NoiseSource.from_seed(0)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with attach(stage, flat(stage), 1.0) as engine:
            sensitivity = engine.sensitivity("add_remove")

        def update() -> None:
            if noisy:
                release_gradients(
                    sensitivity,
                    allocation="equal_budget",
                    noise_multiplier=1.0,
                    expected_batch_size=1.0,
                    noise=noise,
                    step=0,
                )
            optimizer.step()

        update()
        return _usual(update, self._repeats) / sum(p.numel() for p in trained)


def _usual(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)
