"""Low-rank adapters: where they go, what they compute, and that each of them learns."""

import pytest
import torch

from groupwise.config.schema import LoraConfig
from groupwise.errors import UserError
from groupwise.models.language import load_causal, load_classifier
from groupwise.models.trainable import PATIENCE, MovedAdapters, add_adapters

TARGETS = ["c_attn", "c_proj"]


@pytest.fixture
def gpt2(fresh, tokenizer):
    return load_causal(fresh("gpt2", dropout=0.0, attention_dropout=0.0), tokenizer)


def adapters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def move(model, *marks: str) -> None:
    with torch.no_grad():
        for name, parameter in adapters(model).items():
            if any(mark in name for mark in marks):
                parameter.add_(1e-3)


def test_an_adapter_adds_its_scaled_product_to_conv1d(gpt2):
    ids = torch.randint(5, 60, (2, 6))
    plain = gpt2(ids).logits
    weight = gpt2.transformer.h[0].attn.c_attn.weight.detach().clone()
    model = add_adapters(gpt2, LoraConfig(rank=2, alpha=6.0, targets=["c_attn"]))
    assert torch.equal(model(ids).logits, plain)  # B is 0
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape) == ((2, 16), (48, 2))
    torch.nn.init.normal_(b)
    x = torch.randn(3, 16)
    expected = x @ (weight + 3.0 * (b @ a).T) + layer.base_layer.bias  # alpha / rank = 3
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(adapters(model))


def test_the_usual_targets_of_a_type(gpt2, fresh, tokenizer):
    names = adapters(add_adapters(gpt2, LoraConfig(rank=2)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"c_attn"}
    bert = load_classifier(fresh("bert"), ("a", "b"), tokenizer)
    names = adapters(add_adapters(bert, LoraConfig(rank=2)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"query", "value"}


def test_a_longer_end_of_a_name_is_more_exact(gpt2):
    names = adapters(add_adapters(gpt2, LoraConfig(rank=2, targets=["mlp.c_proj"])))
    assert names
    assert all(".mlp.c_proj.lora_" in name for name in names)


@pytest.mark.parametrize("target", ["c_atn", "attn", "wte", "ln_1", "proj", "lm_head"])
def test_an_unknown_target_is_named_with_what_there_is(gpt2, target):
    with pytest.raises(UserError, match=rf"targets={target} names no layer .*some of c_attn, c_fc, c_proj\."):
        add_adapters(gpt2, LoraConfig(targets=["c_attn", target]))


def test_a_type_without_usual_targets_and_a_rank_of_nothing(gpt2):
    with pytest.raises(UserError, match=r"peft refuses model\.lora \(.*r.*0"):
        add_adapters(gpt2, LoraConfig(rank=0, targets=["c_attn"]))
    gpt2.config.model_type = "homemade"
    with pytest.raises(UserError, match=r"no usual layers of homemade: give model\.lora\.targets, some of c_attn"):
        add_adapters(gpt2, LoraConfig())


def test_both_ways_of_storing_a_weight_and_no_warning_about_it(fresh, tokenizer, recwarn):
    untied = load_causal(fresh("gpt2", untie=True), tokenizer)
    names = adapters(add_adapters(untied, LoraConfig(rank=2, targets=["c_attn", "lm_head"])))
    assert names["base_model.model.lm_head.lora_B.default.weight"].shape == (60, 2)
    assert not [str(warning.message) for warning in recwarn]


# -- every adapter learns ---------------------------------------------------------------------------------------------


def test_two_steps_of_training_satisfy_the_check(gpt2):
    model = add_adapters(gpt2, LoraConfig(rank=2, targets=TARGETS))
    watch = MovedAdapters(model)
    optimizer = torch.optim.Adam(adapters(model).values(), lr=1e-3)
    ids = torch.randint(5, 60, (4, 6))
    for step in range(3):
        optimizer.zero_grad()
        model(ids).logits.square().mean().backward()
        if step == 0:
            assert all(float(p.grad.norm()) == 0 for name, p in adapters(model).items() if ".lora_A." in name)
        optimizer.step()
        watch.check(step)
    move(model, "nothing")
    watch.check(3)  # and looks no more


def test_an_output_side_that_stays_is_named_after_the_first_step(gpt2):
    model = add_adapters(gpt2, LoraConfig(rank=2, targets=TARGETS))
    watch = MovedAdapters(model)
    move(model, "h.0.attn.c_attn.lora_B", "h.1.", "h.0.mlp")
    with pytest.raises(UserError, match=r"'.*h\.0\.attn\.c_proj\.lora_B.*' did not move in step 0"):
        watch.check(0)


def test_an_input_side_has_one_step_more(gpt2):
    model = add_adapters(gpt2, LoraConfig(rank=2, targets=TARGETS))
    watch = MovedAdapters(model)
    move(model, ".lora_B.")
    watch.check(0)
    move(model, ".lora_B.", "h.0.attn.c_attn.lora_A", "h.1.", "h.0.mlp")
    with pytest.raises(UserError, match=r"'.*h\.0\.attn\.c_proj\.lora_A.*' did not move in step 1"):
        watch.check(1)


def test_empty_batches_are_waited_for_but_not_for_ever(gpt2):
    model = add_adapters(gpt2, LoraConfig(rank=2, targets=TARGETS))
    watch = MovedAdapters(model)
    for step in range(PATIENCE - 1):
        watch.check(step)
    move(model, ".lora_B.")
    watch.check(PATIENCE - 1)
    for step in range(PATIENCE - 1):
        watch.check(PATIENCE + step)
    with pytest.raises(UserError, match=rf"No adapter moved in {PATIENCE} steps"):
        watch.check(2 * PATIENCE - 1)


def test_a_model_without_adapters_is_refused(gpt2):
    with pytest.raises(UserError, match=r"no adapter that trains: use model\.trains=lora"):
        MovedAdapters(gpt2)
