"""Padded batches have the positions, masks and arguments that each model needs, and padding does not change logits."""

import numpy as np
import pytest
import torch

from groupwise.tasks.samples import ModelInputs
from groupwise.torchvision_import import import_torchvision
from tests.models.conftest import SHAPES

CPU = torch.device("cpu")
ROWS = [np.array(row, dtype=np.int32) for row in ([5, 6, 7, 8], [9, 10], [11, 12, 13])]


def tiny(name: str, **changes):
    import_torchvision()
    import transformers

    own = {"roberta": {"pad_token_id": 1}, "bert": {"type_vocab_size": 2}}.get(name, {})
    config = transformers.AutoConfig.for_model(name, vocab_size=40, **SHAPES.get(name, SHAPES["bert"]) | own, **changes)
    auto = transformers.AutoModelForCausalLM if name == "gpt2" else transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    return auto.from_config(config).double().eval()


def test_positions_are_those_of_the_model_itself():
    model = tiny("roberta")
    inputs = ModelInputs(model, 1)(ROWS, CPU, token_types=ROWS)
    assert inputs["position_ids"].tolist() == [[2, 3, 4, 5], [2, 3, 1, 1], [2, 3, 4, 1]]
    assert not inputs["token_type_ids"].any(), "it has one type only"
    own = model.roberta.embeddings.create_position_ids_from_input_ids(inputs["input_ids"], 1)
    assert torch.equal(own, inputs["position_ids"])
    for model in (tiny("nystromformer"), tiny("ibert")):
        inputs = ModelInputs(model, 1)(ROWS[:1], CPU)
        assert torch.equal(model(**inputs).logits, model(**inputs | {"position_ids": None}).logits)


def test_arguments_of_the_model_are_found_through_adapters():
    import_torchvision()
    import peft

    model = peft.get_peft_model(tiny("gpt2"), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    inputs = ModelInputs(model, 0)
    assert "logits_to_keep" in inputs.accepts
    assert set(inputs(ROWS, CPU)) == {"input_ids", "attention_mask", "position_ids", "use_cache"}


@pytest.mark.parametrize("name", ["gpt2", "roberta", "bert"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_logits_match_those_of_a_single_row(name, attention):
    model = tiny(name, attn_implementation=attention)
    inputs = ModelInputs(model, 1)
    together = model(**inputs(ROWS, CPU)).logits
    for i, row in enumerate(ROWS):
        alone = model(torch.from_numpy(row).long().unsqueeze(0)).logits[0]
        torch.testing.assert_close(
            together[i][: len(alone)] if name == "gpt2" else together[i], alone, rtol=1e-12, atol=0
        )
