"""Holds the layer rules, one file a kind of layer; importing the package registers the built-in ones."""

from groupwise.clipping.rules import (  # noqa: F401
    conv,
    conv_transpose,
    embedding,
    group_norm,
    linear,
    normalization,
)
from groupwise.clipping.rules.attention import ATTENTION
from groupwise.clipping.rules.base import LayerRule, find_rule, register_rule
from groupwise.clipping.rules.embedding_bag import EMBEDDING_BAG
from groupwise.clipping.rules.recurrent import RECURRENT

__all__ = ["REWRITTEN", "LayerRule", "find_rule", "register_rule"]

REWRITTEN = {**RECURRENT, **ATTENTION, **EMBEDDING_BAG}
"""Types of modules that are made of linear layers and embeddings, and their forwards in those terms."""
