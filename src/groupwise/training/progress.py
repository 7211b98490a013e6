"""Shows the progress of training: one line that is updated on a terminal, or a new line every 15 seconds elsewhere."""

import sys
from typing import Any

from tqdm import tqdm

from groupwise.privacy import PrivacyPlan

ON_A_TERMINAL, ELSEWHERE = 0.1, 15.0
"""Seconds between two updates on a terminal, and between two lines elsewhere."""


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar on stderr from step `start` to `end`, with an upper bound of the ε spent, and the time left."""

    monitor_interval = 0  # tqdm's monitor thread would write lines more often

    def __init__(self, plan: PrivacyPlan, start: int, end: int, **others: Any) -> None:
        seconds = ON_A_TERMINAL if sys.stderr.isatty() else ELSEWHERE
        super().__init__(total=end, initial=start, unit="step", mininterval=seconds, miniters=1, **others)
        self._plan, self._note = plan, ""

    def step(self, number: int, note: str = "") -> None:
        """Show that step ``number`` is done. The last ``note``, the accuracy for example, stays visible."""
        if self.disable:  # computing the bound of ε can take a second
            return
        plan, self._note = self._plan, note or self._note
        spent = f"ε {plan.progress(number):.2f} of {plan.epsilon:.4g}" if plan.noise_multiplier else ""
        self.set_postfix_str("  ".join(filter(None, (spent, self._note))), refresh=False)
        self.update()
