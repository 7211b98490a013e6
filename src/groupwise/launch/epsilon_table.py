"""Values that the paper tunes for each epsilon: ``${at_epsilon:{3:40,8:20}}`` in a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from groupwise.errors import UserError


def at_epsilon(table: Mapping[float, Any], epsilon: float | None) -> Any:
    """The entry of ``table`` at ``epsilon``, else at the epsilon nearest in ratio, ties to the smaller.

    Without noise (inf) it is the entry of the largest one, which may be inf itself; where the noise multiplier is given
    instead (None), that of the largest finite one. Raises `UserError` for an epsilon that is not positive.
    """
    known = sorted(table)
    if epsilon == math.inf:
        return table[known[-1]]
    if epsilon is None:
        return table[max((entry for entry in known if entry < math.inf), default=math.inf)]
    if not epsilon > 0:
        raise UserError(f"privacy.epsilon={epsilon:g} must be greater than zero.")
    return table[min(known, key=lambda entry: abs(math.log(entry / epsilon)))]
