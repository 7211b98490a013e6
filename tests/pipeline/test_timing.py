"""Measured costs: one for each part, the slow ones larger, and the model left as it was."""

import pytest
import torch

from groupwise.models.image_networks import wide_resnet
from groupwise.pipeline.split import measure_costs
from groupwise.torchvision_import import import_torchvision
from groupwise.training.task import Microbatch

import_torchvision()  # before transformers, which falls without it
SLOW = 0.02


def texts():
    import transformers

    config = transformers.GPT2Config(
        n_layer=3, n_embd=8, n_head=2, n_positions=16, vocab_size=20, bos_token_id=0, eos_token_id=0
    )
    ids = torch.ones(2, 8, dtype=torch.int64)
    kwargs = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(8).expand(2, 8),
        "places": torch.tensor([[5, 6], [4, 5]]),
        "labels": torch.tensor([[1, 2], [3, 4]]),
    }
    model = transformers.GPT2LMHeadModel(config)
    return model, model.transformer.h, Microbatch(ids, kwargs)


def images():
    model = wide_resnet(depth=10, width=1, norm_groups=4)
    return model, model.blocks, Microbatch(torch.rand(2, 3, 8, 8), {"labels": torch.tensor([0, 1])})


@pytest.mark.parametrize("make", [texts, images])
def test_each_part_has_its_time(make, monkeypatch):
    """On a clock of its own, which moves a little at each look and much in one block."""
    model, blocks, microbatch = make()
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr("groupwise.pipeline.split.perf_counter", lambda: pass_by(SLOW / 100))
    forward = type(blocks[1]).forward
    blocks[1].forward = lambda *args, **kwargs: (pass_by(SLOW), forward(blocks[1], *args, **kwargs))[1]
    names = list(model.state_dict())
    entry, *costs, head = measure_costs(model, microbatch)
    assert len(costs) == len(blocks) and min(entry, head, *costs) > 0
    assert costs[1] >= SLOW and max(costs) == costs[1]
    assert list(model.state_dict()) == names and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
