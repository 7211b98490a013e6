"""ε after the steps that were really taken, by every accountant."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from groupwise.privacy.accounting import EpsilonBounds


@dataclass(frozen=True)
class EpsilonReport:
    """What ``executed_steps`` releases cost at ``delta``; ``epsilon`` is the upper bound of the plan's accountant.

    ``prv`` brackets ε (its ``note`` says when PLD stood in for it); ``rdp`` and ``pld`` are upper bounds (``pld`` None
    unless it was the plan's accountant). A run without noise has cost infinity, one without steps nothing.
    ``guaranteed`` is False for shuffled batches, whose figures are what Poisson samples would have cost, and for
    infinite ε.
    """

    executed_steps: int
    delta: float
    accountant: str
    prv: EpsilonBounds
    rdp: float
    pld: float | None
    guaranteed: bool

    @property
    def epsilon(self) -> float:
        """The ε to quote."""
        if self.accountant == "pld" and self.pld is not None:
            return self.pld
        return self.rdp if self.accountant == "rdp" else self.prv.upper

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; an infinite ε is the string "inf"."""
        return finite_json({"epsilon": self.epsilon, **asdict(self)})


def finite_json(value: Any) -> Any:
    """Return ``value`` with infinite floats as "inf", since JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return "inf" if isinstance(value, float) and math.isinf(value) else value
