"""`choose_trainable` selects the trainable parameters and the precision of frozen ones."""

import pytest
import torch

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import load_causal, load_classifier
from groupwise.models.trainable import choose_trainable

CLASSES = ("negative", "positive")


@pytest.fixture
def build(fresh, tokenizer):
    """A function that builds a small model with only the chosen parameters trainable."""

    def make(architecture: str, causal: bool = False, **changes):
        settings = fresh(architecture, **changes)
        model = load_causal(settings, tokenizer) if causal else load_classifier(settings, CLASSES, tokenizer)
        return choose_trainable(model, settings)

    return make


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_attention_trains_self_attention_and_head(build):
    model = build("roberta", trains="attention")
    layers = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    attention = {
        f"roberta.encoder.layer.{i}.attention.{layer}.{part}"
        for i in range(2)
        for layer in layers
        for part in ("weight", "bias")
    }
    head = {f"classifier.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")}
    assert trained(model) == attention | head


def test_bias_trains_biases_and_head(build):
    model = build("bert", trains="bias")
    weights = {name for name in trained(model) if not name.endswith(".bias")}
    assert weights == {"classifier.weight", "bert.pooler.dense.weight"}
    assert {name for name, _ in model.named_parameters() if name.endswith(".bias")} <= trained(model)
    assert all(name.endswith(".bias") for name in trained(build("gpt2", causal=True, trains="bias")))


def test_lora_trains_adapters_and_head(build):
    model = build("roberta", trains="lora")
    pattern = "base_model.model.roberta.encoder.layer.{}.attention.self.{}.lora_{}.default.weight"
    adapters = {pattern.format(i, layer, side) for i in range(2) for layer in ("query", "value") for side in "AB"}
    head = {name for name in trained(model) if ".classifier." in name}
    assert trained(model) == adapters | head
    assert len(head) == 4
    assert not any("classifier" in name for name in trained(build("gpt2", causal=True, trains="lora")))


@pytest.mark.parametrize("trains", ["attention", "bias", "lora"])
def test_only_frozen_matrices_are_bfloat16(build, trains):
    for architecture, causal in (("roberta", False), ("gpt2", True)):
        model = build(architecture, causal, trains=trains, frozen_dtype="bfloat16")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32, name
            elif parameter.dim() > 1:
                assert parameter.dtype == torch.bfloat16, name


def test_adapters_and_head_are_reloaded_from_their_folder(build, fresh, tokenizer, tmp_path):
    """An export is complete: peft loads it onto the base model, and the logits are the same."""
    import peft

    torch.manual_seed(0)
    base = load_classifier(fresh("roberta"), CLASSES, tokenizer).eval()
    torch.manual_seed(0)
    model = build("roberta", trains="lora").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, 60, (2, 6))
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    load_classifier(fresh("roberta"), CLASSES, tokenizer).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds adapters of peft"):
        load_classifier(ModelConfig(source=str(tmp_path)), CLASSES, tokenizer)


def test_model_without_attention_or_bias_is_refused(build):
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(UserError, match="Sequential has no self-attention module to train"):
        choose_trainable(plain, ModelConfig(trains="attention"))
    with pytest.raises(UserError, match="Sequential has no bias"):
        choose_trainable(plain, ModelConfig(trains="bias"))
    with pytest.raises(UserError, match="ModernBertForSequenceClassification has no bias"):
        build("modernbert", trains="bias", shape={"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2})


def test_adapter_of_the_head_is_refused(build):
    with pytest.raises(UserError, match=r"peft refuses model\.lora"):
        build("roberta", trains="lora", lora=LoraConfig(targets=["out_proj"]))


@pytest.mark.parametrize("target", ["c_atn", "attn", "ln_1", "proj"])
def test_unknown_target_is_refused(build, target):
    with pytest.raises(UserError, match=rf"targets={target} names no layer|peft refuses model\.lora"):
        build("gpt2", causal=True, trains="lora", lora=LoraConfig(targets=["c_attn", target]))
