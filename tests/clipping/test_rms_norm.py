"""RMSNorm, torch's own and those of transformers, beside what every layer is held to."""

import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.errors import UserError
from groupwise.torchvision_import import import_torchvision
from tests.clipping.traced import clip, clip_batch


def test_inputs_of_another_size_are_refused():
    for module, shape in ((nn.RMSNorm(5), (5,)), (nn.RMSNorm((3, 5)), (3, 5))):
        with attach(module, flat(module), 1.0) as engine, pytest.raises(UserError, match="the batch must come first"):
            clip_batch(engine, lambda x, run=module: run(x).flatten(1).sum(1), torch.ones(shape))


def test_those_of_transformers_are_exact_and_nothing_warns():
    import_torchvision()
    transformers = importlib.import_module("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Qwen3Config(vocab_size=30, num_key_value_heads=1, max_position_embeddings=12, **sizes)
    torch.manual_seed(0)
    model, ids = transformers.Qwen3ForCausalLM(config), torch.randint(0, 30, (4, 7))
    positions = torch.arange(7).expand(4, 7)

    def losses(rows: Tensor) -> Tensor:
        logits = model(input_ids=ids[rows], position_ids=positions[rows]).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[rows, 1:], reduction="none").sum(1)

    partition = per_layer(model)
    thresholds = [0.1] * len(partition)
    truth = clipped_sums(model, lambda i: losses(torch.tensor([i]))[0], range(4), partition, thresholds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = attach(model, partition, thresholds)
    with engine:
        clip(engine, lambda rows: losses(torch.tensor(list(rows))), range(4))
    torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-4, atol=1e-5, check_dtype=False)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-4, atol=1e-5)
