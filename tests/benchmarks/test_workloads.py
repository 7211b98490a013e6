"""Workloads have per-example losses that reach every trainable parameter, and are deterministic."""

import pytest
import torch

from benchmarks.workloads import WORKLOADS, build


@pytest.mark.parametrize("name", WORKLOADS)
def test_losses_are_per_example_and_reach_all_trainable_parameters(name: str) -> None:
    workload = build(name, tiny=True)
    losses = workload.loss()
    losses.sum().backward()
    assert losses.shape == (workload.batch,) and bool(losses.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.any()) for p in workload.trainable)
    assert workload.model.training
    assert torch.equal(losses, workload.loss())  # no dropout


@pytest.mark.parametrize("name", WORKLOADS)
def test_loss_of_an_example_is_independent_of_the_others(name: str) -> None:
    torch.manual_seed(1)
    workload = build(name, tiny=True, dtype="float64")
    one, *_ = torch.autograd.grad(workload.loss()[0], workload.trainable, allow_unused=True)
    gradients = [torch.autograd.grad(loss, workload.trainable[0], retain_graph=True)[0] for loss in workload.loss()]
    assert torch.allclose(one, gradients[0]) and not torch.allclose(gradients[0], gradients[1])


def test_gpt2_xl_is_frozen_in_bfloat16_and_trains_float32_adapters() -> None:
    model = build("lora_gpt2_xl", device="meta").model  # the full shape, without its memory
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in frozen) == 1_557_611_200  # as many as openai-community/gpt2-xl has
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert sum(p.numel() for p in trained) == 48 * 32 * (1600 + 3 * 1600)
    assert {p.dtype for p in trained} == {torch.float32}


def test_channels_last_changes_only_the_layout() -> None:
    plain, last = (build("wrn16_4_conv", tiny=True, dtype="float64", channels_last=c) for c in (False, True))
    torch.testing.assert_close(plain.loss(), last.loss())
    weight = last.model.blocks[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
