"""RMSNorm, torch's own and those of transformers, beside what every layer is held to."""

import importlib
import warnings

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.errors import UserError
from groupwise.torchvision_import import import_torchvision
from tests.clipping.traced import clip_batch


def test_inputs_of_another_size_are_refused():
    for module, shape in ((nn.RMSNorm(5), (5,)), (nn.RMSNorm((3, 5)), (3, 5))):
        with attach(module, flat(module), 1.0) as engine, pytest.raises(UserError, match="the batch must come first"):
            clip_batch(engine, lambda x, run=module: run(x).flatten(1).sum(1), torch.ones(shape))


def test_those_of_transformers_have_a_rule_and_nothing_warns():
    import_torchvision()
    norms = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    model = norms.Qwen3RMSNorm(8)
    with warnings.catch_warnings(action="error"), attach(model, per_layer(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).sum((1, 2)), torch.randn(3, 4, 8))
