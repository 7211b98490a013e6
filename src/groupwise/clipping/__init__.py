"""Clips per-example gradients group by group for any PyTorch model; needs nothing but torch.

>>> import torch
>>> from groupwise.clipping import attach, per_layer
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> engine = attach(model, per_layer(model), thresholds=0.1)
>>> x, y = torch.randn(8, 4), torch.randint(2, (8,))
>>> losses = lambda rows: torch.nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
>>> _ = engine.trace(losses, range(6))
>>> _ = engine.clip(losses, [0, 3, 5])
>>> bool(model[0].weight.grad.norm() <= 3 * 0.1)
True
"""

from groupwise.clipping.clip_plan import ClipPlan, UntracedCall
from groupwise.clipping.engine import ClippingEngine, attach
from groupwise.clipping.factors import Sensitivity, automatic_factors, clip_factors
from groupwise.clipping.measure import gradient_norms
from groupwise.clipping.norm_methods import Rates
from groupwise.clipping.partition import Group, Partition, by_mapping, flat, per_block, per_layer
from groupwise.clipping.reference import explain
from groupwise.clipping.rules import LayerRule, register_rule
from groupwise.clipping.rules.computed_weight import WSConv2d
from groupwise.clipping.verification import verify

__all__ = [
    "ClipPlan",
    "ClippingEngine",
    "Group",
    "LayerRule",
    "Partition",
    "Rates",
    "Sensitivity",
    "UntracedCall",
    "WSConv2d",
    "attach",
    "automatic_factors",
    "by_mapping",
    "clip_factors",
    "explain",
    "flat",
    "gradient_norms",
    "per_block",
    "per_layer",
    "register_rule",
    "verify",
]
