"""Shows how far a training is: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TextIO


class Progress:
    """A bar on a terminal, and elsewhere (a log file, a cluster) a line now and then.

    ``epsilon`` maps executed steps to the budget spent so far (``PrivacyPlan.progress``); None shows none.
    ``start`` is the step after which a resumed run begins. Use it as a context manager.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        epsilon: Callable[[int], float] | None = None,
        target_epsilon: float = float("inf"),
        seconds_between_lines: float = 15.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self._start = self._step = start
        self._epsilon = epsilon
        self._target = target_epsilon
        self._between = seconds_between_lines
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = self._last_line = clock()
        self._examples = 0
        self._note = ""
        self._bar = _bar(steps, start, self._stream) if self._stream.isatty() else None

    def update(self, step: int, examples: int, note: str = "") -> None:
        """``step`` steps are done, the last of them on ``examples`` examples; ``note`` (accuracy, say) stays
        on view."""
        self._examples += examples
        self._note = note or self._note
        advanced, self._step = step - self._step, step
        if self._bar is not None:
            self._bar.set_postfix_str(self._state(), refresh=False)
            self._bar.update(advanced)
        elif step >= self.steps or self._clock() - self._last_line >= self._between:
            self._last_line = self._clock()
            seconds = self._seconds() / max(step - self._start, 1) * (self.steps - step)
            left = timedelta(seconds=round(seconds))
            print(f"step {step}/{self.steps}  {self._state()}  {left} left", file=self._stream, flush=True)

    @property
    def examples_per_second(self) -> float:
        """Throughput of this process since it began."""
        return self._examples / max(self._seconds(), 1e-9)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds(self) -> float:
        return self._clock() - self._began

    def _state(self) -> str:
        parts = [f"{self.examples_per_second:.0f} examples/s"]
        if self._epsilon is not None:
            parts.insert(0, f"ε {self._epsilon(self._step):.2f} of {self._target:g}")
        return "  ".join([*parts, self._note] if self._note else parts)


def _bar(steps: int, start: int, stream: TextIO) -> Any:
    """None where tqdm is not installed, as it is of an extra: then there are lines."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=start, file=stream, unit="step", dynamic_ncols=True)
