"""Workloads: per-example losses, gradients for all that trains, equal for equal arguments."""

import pytest
import torch

from benchmarks.workloads import WORKLOADS, build, check
from groupwise.errors import UserError


@pytest.mark.parametrize("name", WORKLOADS)
def test_losses_are_per_example_and_reach_everything_that_trains(name: str) -> None:
    workload = build(name, tiny=True)
    losses = workload.loss()
    losses.sum().backward()
    assert losses.shape == (workload.batch,) and bool(losses.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.any()) for p in workload.trainable)
    assert workload.model.training
    assert torch.equal(losses, workload.loss())  # no dropout


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_example_does_not_see_the_others(name: str) -> None:
    torch.manual_seed(1)
    workload = build(name, tiny=True, dtype="float64")
    one, *_ = torch.autograd.grad(workload.loss()[0], workload.trainable, allow_unused=True)
    whole = [torch.autograd.grad(loss, workload.trainable[0], retain_graph=True)[0] for loss in workload.loss()]
    assert torch.allclose(one, whole[0]) and not torch.allclose(whole[0], whole[1])


def test_equal_arguments_give_equal_workloads_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (build("mlp", tiny=True, seed=seed).loss() for seed in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_sizes_are_those_of_the_paper() -> None:
    mlp = build("mlp")
    assert (mlp.batch, sum(p.numel() for p in mlp.trainable)) == (256, 784 * 1024 + 1024 * 1024 + 10240 + 2058)
    wrn = build("wrn16_4_conv", batch=2)
    assert wrn.loss().shape == (2,)
    assert 2.7e6 < sum(p.numel() for p in wrn.trainable) < 2.9e6
    assert {name: kind.batch for name, kind in WORKLOADS.items()}["gpt2"] == 4


def test_gpt2_is_tied_or_not() -> None:
    tied, untied = (build(name, tiny=True).model for name in ("gpt2", "gpt2_untied"))
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight


def test_lora_trains_two_factors_on_four_layers_of_each_block() -> None:
    workload = build("lora_gpt2", tiny=True, layers=3)
    names = [name for name, p in workload.model.named_parameters() if p.requires_grad]
    assert len(names) == 3 * 4 * 2 and all("lora_" in name for name in names)


def test_the_depth_is_an_option_of_language_models() -> None:
    assert build("gpt2", tiny=True, layers=1).layers == 1
    assert WORKLOADS["roberta_base"].layers == 12


def test_tokens_are_an_option_of_language_models() -> None:
    assert (build("gpt2", tiny=True).tokens, build("gpt2", tiny=True, tokens=11).tokens) == (7, 11)
    assert build("roberta_base", tiny=True, tokens=512).loss().isfinite().all()
    assert build("mlp", tiny=True).tokens is None


def test_gpt2_xl_is_frozen_in_bfloat16_and_trains_float32_adapters() -> None:
    model = build("lora_gpt2_xl", device="meta").model  # the full shape, without its memory
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in frozen) == 1_557_611_200  # that of openai-community/gpt2-xl
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert sum(p.numel() for p in trained) == 48 * 32 * (1600 + 3 * 1600)
    assert {p.dtype for p in trained} == {torch.float32}


def test_channels_last_changes_the_layout_and_nothing_else() -> None:
    plain, last = (build("wrn16_4_conv", tiny=True, dtype="float64", channels_last=c) for c in (False, True))
    torch.testing.assert_close(plain.loss(), last.loss())
    weight = last.model.blocks[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_bfloat16_keeps_float32_parameters_and_losses() -> None:
    workload, exact = build("mlp", tiny=True, dtype="bfloat16"), build("mlp", tiny=True)
    assert workload.trainable[0].dtype == workload.loss().dtype == torch.float32
    assert 0 < float((workload.loss() - exact.loss()).detach().abs().max()) < 0.1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt3", {}, "did you mean gpt2?"),
        ("mlp", {"layers": 3}, "no option"),
        ("mlp", {"tokens": 3}, "no option"),
        ("gpt2", {"tokens": 1025}, "1024 positions"),
        ("mlp", {"batch": 0}, "at least 1"),
        ("mlp", {"channels_last": True}, "no images"),
        ("mlp", {"dtype": "float16"}, "did you mean"),
    ],
)
def test_mistakes_are_told(name: str, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        check(name, **{"batch": None, "layers": None, **options})
