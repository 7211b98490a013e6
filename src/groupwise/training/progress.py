"""Shows how far a training is: a line that is renewed on a terminal, and elsewhere a new one now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from groupwise.privacy import PrivacyPlan

ON_A_TERMINAL, ELSEWHERE = 0.1, 15.0
"""Seconds between two lines."""


class Progress:
    """Steps, the ε spent so far and speed, in a line. Use it as a context manager.

    Args:
        steps: after which the last line is written. start: the steps taken before. plan: of the training.
        stream: stderr by default. clock: in seconds.
    """

    def __init__(
        self,
        steps: int,
        start: int,
        plan: PrivacyPlan,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self._start, self._plan = steps, start, plan
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._clock = clock
        self._began = self._last_line = clock()
        self._examples = 0
        self._note = ""

    def update(self, step: int, examples: int, note: str = "") -> None:
        """``step`` steps are done, the last of them on ``examples`` examples; ``note`` (accuracy, say) stays on view.

        A line is written if the last one was long ago, or if this is the last step.
        """
        self._examples += examples
        self._note = note or self._note
        now = self._clock()
        if step < self.steps and now - self._last_line < (ON_A_TERMINAL if self._terminal else ELSEWHERE):
            return
        self._last_line = now
        left = timedelta(seconds=round((now - self._began) / max(step - self._start, 1) * (self.steps - step)))
        plan = self._plan
        spent = f"ε {plan.progress(step):.2f} of {plan.epsilon:g}" if plan.noise_multiplier else ""
        speed = f"{self.examples_per_second:.0f} examples/s"
        line = "  ".join(filter(None, (f"step {step}/{self.steps}", spent, speed, self._note, f"{left} left")))
        print(f"\r{line}\x1b[K" if self._terminal else f"{line}\n", end="", file=self._stream, flush=True)

    @property
    def examples_per_second(self) -> float:
        """Throughput of this process since it began."""
        return self._examples / max(self._clock() - self._began, 1e-9)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            print(file=self._stream)
