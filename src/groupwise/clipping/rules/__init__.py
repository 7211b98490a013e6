"""Holds the layer rules, one file a kind of layer; importing the package registers the built-in ones."""

from collections.abc import Callable
from typing import Any

from torch import nn

from groupwise.clipping.rules import (  # noqa: F401
    computed_weight,
    conv,
    embedding,
    linear,
    normalization,
    recurrent,
)
from groupwise.clipping.rules.base import LayerRule, find_rule, register_rule

__all__ = ["REWRITTEN", "LayerRule", "find_rule", "register_rule"]

REWRITTEN: dict[Any, Callable[..., Any]] = dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent.recurrent)
"""Types of modules that are made of linear layers, and their forwards in those terms."""
