"""Clips per-example gradients group by group for any PyTorch model; needs nothing but torch.

>>> import torch
>>> from groupwise.clipping import attach, per_layer
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> engine = attach(model, per_layer(model), thresholds=0.1)
>>> losses = torch.nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 1]), reduction="none")
>>> engine.backward(losses)
>>> bool(model[0].weight.grad.norm() <= 3 * 0.1)
True
>>> engine.detach()
"""

from groupwise.clipping.cost_model import Rates
from groupwise.clipping.engine import ClippingEngine, attach
from groupwise.clipping.factors import Sensitivity, automatic_factors, clip_factors
from groupwise.clipping.measure import gradient_norms
from groupwise.clipping.partition import Group, Partition, by_mapping, flat, per_block, per_layer
from groupwise.clipping.reference import explain
from groupwise.clipping.rules import LayerRule, register_rule
from groupwise.clipping.rules.ws_conv import WSConv2d
from groupwise.clipping.verification import verify

__all__ = [
    "ClippingEngine",
    "Group",
    "LayerRule",
    "Partition",
    "Rates",
    "Sensitivity",
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
