"""Holds the layer rules, one file a kind of layer; importing the package registers the built-in ones."""

from groupwise.clipping.rules import computed_weight, conv, embedding, linear, normalization, recurrent  # noqa: F401
from groupwise.clipping.rules.base import LayerRule, find_rule, register_rule

__all__ = ["LayerRule", "find_rule", "register_rule"]
