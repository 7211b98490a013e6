"""Which parameters train, and in which precision."""

import pytest
import torch

from groupwise.clipping import attach, per_layer
from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import load_causal, load_classifier
from groupwise.models.trainable import choose_trainable

CLASSES = ("negative", "positive")


@pytest.fixture
def made(fresh, tokenizer):
    """A small model of which only the chosen parameters train."""

    def make(architecture: str, causal: bool = False, **changes):
        settings = fresh(architecture, **changes)
        model = load_causal(settings, tokenizer) if causal else load_classifier(settings, CLASSES, tokenizer)
        return choose_trainable(model, settings)

    return make


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_all_is_all(made):
    for model in (made("roberta"), made("gpt2", causal=True)):
        assert trained(model) == {name for name, _ in model.named_parameters()}


def test_self_attention_of_roberta_and_its_head(made):
    model = made("roberta", trains="attention")
    layers = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    attention = {
        f"roberta.encoder.layer.{i}.attention.{layer}.{part}"
        for i in range(2)
        for layer in layers
        for part in ("weight", "bias")
    }
    head = {f"classifier.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")}
    assert trained(model) == attention | head


def test_self_attention_of_gpt2_leaves_a_language_models_head_alone(made):
    attention = {
        f"transformer.h.{i}.attn.{layer}.{part}"
        for i in range(2)
        for layer in ("c_attn", "c_proj")
        for part in ("weight", "bias")
    }
    assert trained(made("gpt2", causal=True, trains="attention")) == attention
    assert trained(made("gpt2", causal=True, trains="attention", untie=True)) == attention
    assert trained(made("gpt2", trains="attention")) == attention | {"score.weight"}


def test_biases_and_the_head(made):
    model = made("bert", trains="bias")
    weights = {name for name in trained(model) if not name.endswith(".bias")}
    assert weights == {"classifier.weight", "bert.pooler.dense.weight"}
    assert {name for name, _ in model.named_parameters() if name.endswith(".bias")} <= trained(model)
    assert all(name.endswith(".bias") for name in trained(made("gpt2", causal=True, trains="bias")))


def test_adapters_and_the_head(made):
    model = made("roberta", trains="lora")
    pattern = "base_model.model.roberta.encoder.layer.{}.attention.self.{}.lora_{}.default.weight"
    adapters = {pattern.format(i, layer, side) for i in range(2) for layer in ("query", "value") for side in "AB"}
    head = {name for name in trained(model) if ".classifier." in name}
    assert trained(model) == adapters | head
    assert len(head) == 4
    assert not any("classifier" in name for name in trained(made("gpt2", causal=True, trains="lora")))


@pytest.mark.parametrize("trains", ["attention", "bias", "lora"])
def test_frozen_matrices_in_half_precision_and_the_rest_in_float32(made, trains):
    for architecture, causal in (("roberta", False), ("gpt2", True)):
        model = made(architecture, causal, trains=trains, frozen_dtype="bfloat16")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32, name
            elif parameter.dim() > 1:
                assert parameter.dtype == torch.bfloat16, name


@pytest.mark.parametrize("trains", ["attention", "bias", "lora"])
def test_a_private_step_with_frozen_half_precision(made, trains):
    """Under autocast, as such a run is; the sums are float32."""
    for architecture, causal, first in (("roberta", False, 2), ("gpt2", True, 0)):
        model = made(architecture, causal, trains=trains, frozen_dtype="bfloat16")
        ids = torch.randint(5, 60, (3, 6))
        with attach(model, per_layer(model), 0.1) as engine:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, position_ids=torch.arange(6).repeat(3, 1) + first).logits
            engine.backward(logits.float().flatten(1).square().mean(1))
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
        assert engine.nonfinite == 0


def test_trained_adapters_come_back_from_their_folder_with_the_head(made, fresh, tokenizer, tmp_path):
    """What an export writes is whole: peft puts it onto the base model, and the logits are the same."""
    import peft

    torch.manual_seed(0)
    base = load_classifier(fresh("roberta"), CLASSES, tokenizer).eval()
    torch.manual_seed(0)
    model = made("roberta", trains="lora").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, 60, (2, 6))
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_what_cannot_be_chosen(made):
    with pytest.raises(UserError, match=r"model\.trains=some is not one of"):
        made("roberta", trains="some")
    with pytest.raises(UserError, match=r"model\.frozen_dtype=int8 is not one of"):
        made("roberta", trains="bias", frozen_dtype="int8")
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(UserError, match="Sequential has no self-attention module that could train alone"):
        choose_trainable(plain, ModelConfig(trains="attention"))
    with pytest.raises(UserError, match="Sequential has no bias"):
        choose_trainable(plain, ModelConfig(trains="bias"))


def test_an_adapter_of_the_head_is_refused(made):
    with pytest.raises(UserError, match=r"model\.lora\.targets=out_proj names no layer"):
        made("roberta", trains="lora", lora=LoraConfig(targets=["out_proj"]))
