"""Layer rules, one file each. Importing the package registers the built-in ones."""

from groupwise.clipping.rules import (  # noqa: F401
    conv,
    conv_transpose,
    embedding,
    group_norm,
    hf_conv1d,
    instance_norm,
    layer_norm,
    linear,
    rms_norm,
    ws_conv,
)
from groupwise.clipping.rules.base import LayerRule, find_rule, register_rule

__all__ = ["LayerRule", "find_rule", "register_rule"]
