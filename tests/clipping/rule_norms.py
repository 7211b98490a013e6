"""The squared norms of a rule, by whichever way it finds them."""

from typing import Any

from torch import Tensor

from groupwise.clipping.norm_terms import squares_together
from groupwise.clipping.rules.base import LayerRule, RuleContext


def squares_of(rule: LayerRule, saved: Any, g: Tensor, wanted: tuple[bool, ...], context: RuleContext) -> Tensor:
    """‖g^(i)‖², (B,)."""
    closed = rule.squared_norms(saved, g, wanted, context)
    return squares_together([[rule.formed_norms(saved, g, wanted) if closed is None else closed]])[0]
