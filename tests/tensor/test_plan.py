"""Which layers are cut how, and which models are refused by the name of a layer."""

import pytest
from torch import nn

from groupwise.errors import UserError
from groupwise.tensor.plan import cuts_of
from groupwise.torchvision_import import import_torchvision
from tests.tensor.tiny import WORDS, make_model


@pytest.fixture(autouse=True)
def _torchvision():
    import_torchvision()  # before transformers, which falls without it


class Unknown(nn.Module):
    """No model of transformers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)


def _with_bias_alone():
    model = make_model("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def _with_adapters():
    import peft

    return peft.get_peft_model(make_model("gpt2"), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def _with_norms_of_heads():
    import transformers as t

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": WORDS}
    return t.Qwen3ForCausalLM(t.Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=2))


def _odd():
    import transformers as t

    return t.GPT2LMHeadModel(t.GPT2Config(n_embd=8, n_inner=9, n_layer=1, n_head=2, vocab_size=WORDS))


REFUSED = {
    "layer 'stem' of Unknown": (Unknown, 2),
    "the adapter 'base_model.*c_attn.lora_": (_with_adapters, 2),
    "q_norm.* of qwen3": (_with_norms_of_heads, 2),
    "does not divide layer 'transformer.h.0.mlp.c_fc', which is 9 wide": (_odd, 2),
    "does not divide the 2 heads .* of layer 'transformer.h.0.attn.c_attn'": (lambda: make_model("gpt2"), 4),
    "does not divide the 2 heads .*num_key_value_heads.*q_proj": (lambda: make_model("llama"), 4),
    "'transformer.h.0.attn.c_attn' trains its bias alone": (_with_bias_alone, 2),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(told):
    make, parts = REFUSED[told]
    with pytest.raises(UserError, match=told) as refused:
        cuts_of(make(), parts)
    assert "\n" not in str(refused.value)


def test_what_is_cut_of_a_model():
    ways = {each.name: (each.way, each.pieces) for each in cuts_of(make_model("roberta"), 2)}
    layer = "roberta.encoder.layer.0"
    assert ways == {
        f"{layer}.attention.self.query": ("columns", 1),
        f"{layer}.attention.self.key": ("columns", 1),
        f"{layer}.attention.self.value": ("columns", 1),
        f"{layer}.attention.output.dense": ("rows", 1),
        f"{layer}.intermediate.dense": ("columns", 1),
        f"{layer}.output.dense": ("rows", 1),
        "roberta.embeddings.word_embeddings": ("table", 1),
    }
