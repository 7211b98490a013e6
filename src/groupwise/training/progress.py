"""Shows the progress of a training: one updated line on a terminal, and a line now and then elsewhere."""

import sys
from typing import Any

from tqdm import tqdm

from groupwise.privacy import PrivacyPlan

ON_A_TERMINAL, ELSEWHERE = 0.1, 15.0
"""Seconds between two lines."""


class Progress(tqdm):  # type: ignore[type-arg]
    """Steps, a bound of the ε spent so far, and the time that is left, on stderr. Use it as a context manager.

    Args:
        plan: of the training. start: the steps taken before. end: after which the last line is written.
        others: of tqdm.
    """

    monitor_interval = 0  # no thread that writes lines earlier

    def __init__(self, plan: PrivacyPlan, start: int, end: int, **others: Any) -> None:
        seconds = ON_A_TERMINAL if sys.stderr.isatty() else ELSEWHERE
        super().__init__(total=end, initial=start, unit="step", mininterval=seconds, miniters=1, **others)
        self._plan, self._note = plan, ""

    def step(self, number: int, note: str = "") -> None:
        """Step ``number`` is done; ``note`` (accuracy, say) stays on view."""
        if self.disable:  # what ε is bounded by can take a second
            return
        plan, self._note = self._plan, note or self._note
        spent = f"ε {plan.progress(number):.2f} of {plan.epsilon:g}" if plan.noise_multiplier else ""
        self.set_postfix_str("  ".join(filter(None, (spent, self._note))), refresh=False)
        self.update()
