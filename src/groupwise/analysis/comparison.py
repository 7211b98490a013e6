"""What a measured number says about the paper's: the status of a line, and why."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.analysis.absent import needs, why_not_run
from groupwise.analysis.statistics import Summary
from groupwise.cells import PAPER, Sweep

MARGIN = 1.0
"""Points (all metrics are in percent) by which a mean over seeds may differ from the paper's and still reproduce it."""
REPRODUCED, DIFFERS, INCOMPLETE = "reproduced", "differs", "incomplete"
REDUCED, NOT_RUN, QUOTED, UNPRINTED = "reduced only", "not run", "quoted", "not in the paper"
STATUSES = {
    REPRODUCED: f"scale=paper, all seeds, and the mean within {MARGIN:g} point of the paper's",
    DIFFERS: f"scale=paper, all seeds, and the mean further than {MARGIN:g} point from the paper's",
    INCOMPLETE: "scale=paper, and seeds are missing: no verdict",
    UNPRINTED: "scale=paper, and the paper measured nothing there",
    REDUCED: "smaller data, model or training, or another model: not to be compared with the paper's number",
    NOT_RUN: "there is no row",
    QUOTED: "the paper took the number from elsewhere: not ours to reproduce",
}
"""Each status and what it means."""
STAND_IN, UNMEASURED = "paper:", "not measured"
"""How a note begins where our cell stands in for what cannot be had, and where no run of the paper is behind it."""


def compare(
    number: Mapping[Any, Any], measured: Summary, expected: int, scale: str, cells: Sequence[str], sweep: Sweep
) -> tuple[str, str]:
    """Status and reason of one number of the paper (a line of `read_paper`), given what was measured at `scale`.

    `cells` are the cells it is of; with none, it is not ours to reproduce. Only rows at the paper's scale are compared.
    """
    if not cells:
        return QUOTED, number["note"]
    if not measured.n:
        return NOT_RUN, why_not_run(sweep, cells)
    if scale != PAPER:
        return REDUCED, f"scale={scale}; {needs(cells)}"
    if number["note"].startswith(STAND_IN):
        return REDUCED, number["note"]
    if measured.n < expected:
        return INCOMPLETE, f"{measured.n} of {expected} seeds"
    if number["note"].startswith(UNMEASURED) or math.isnan(number["value"]):
        return UNPRINTED, number["note"]
    difference = measured.mean - number["value"]
    words = f"by {difference:+.2f} points{_interval(measured, number['value'])}"
    return (REPRODUCED if abs(difference) <= MARGIN else DIFFERS), words


def _interval(measured: Summary, value: float) -> str:
    if math.isnan(measured.low):
        return ""
    inside = measured.low <= value <= measured.high
    return f"; the 95 % interval of our mean {'holds' if inside else 'leaves out'} the paper's"
