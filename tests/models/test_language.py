"""Language models are loaded with the right weights and precision; invalid settings are refused in one sentence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import is_head, load_causal, load_classifier, padding_token, position_limit
from tests.models.conftest import SHAPES

CLASSES = ("negative", "positive")


def copy(folder, tmp_path, **changes):
    """A copy of a model folder with a changed configuration."""
    target = tmp_path / "copy"
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def names(model) -> set[str]:
    return {name for name, _ in model.named_parameters()}


# -- fresh weights ----------------------------------------------------------------------------------------------------


def test_fresh_model_has_vocabulary_and_special_tokens_of_the_tokeniser(fresh, tokenizer):
    for model in (load_causal(fresh("gpt2"), tokenizer), load_classifier(fresh("roberta"), CLASSES, tokenizer)):
        config = model.config
        assert config.vocab_size == len(tokenizer) == 60
        assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)
        assert model.training
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fresh_weights_have_the_shape_of_a_folder(folders, tokenizer):
    pretrained = load_causal(ModelConfig(source=str(folders["gpt2"])), tokenizer)
    scratch = load_causal(ModelConfig(source=str(folders["gpt2"]), fresh=True), tokenizer)
    deeper = load_causal(ModelConfig(source=str(folders["gpt2"]), fresh=True, shape={"n_layer": 3}), tokenizer)
    assert names(scratch) == names(pretrained) < names(deeper)
    assert not torch.equal(scratch.transformer.wte.weight, pretrained.transformer.wte.weight)
    assert {p.dtype for p in scratch.parameters()} == {torch.float32}  # though config.json says float16


# -- weights from a folder --------------------------------------------------------------------------------------------


def test_frozen_half_precision_is_not_converted_to_float32(folders, tokenizer):
    lora = ModelConfig(source=str(folders["gpt2"]), trains="lora", frozen_dtype="bfloat16")
    assert {p.dtype for p in load_causal(lora, tokenizer).parameters()} == {torch.bfloat16}
    bias = ModelConfig(source=str(folders["gpt2"]), trains="bias", frozen_dtype="bfloat16")
    assert {p.dtype for p in load_causal(bias, tokenizer).parameters()} == {torch.float32}


def test_classifier_on_a_masked_model_has_a_fresh_head_silently(folders, tokenizer, capfd):
    settings = ModelConfig(source=str(folders["roberta"]))
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = load_classifier(settings, CLASSES, tokenizer)
        heads.append(model.classifier.dense.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    stored = load_file(folders["roberta"] / "model.safetensors")
    assert torch.equal(model.roberta.encoder.layer[1].output.dense.weight, _stored(stored, "1.output.dense.weight"))
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config.label2id == {"negative": 0, "positive": 1}
    assert not any(capfd.readouterr())


def _stored(weights, end):
    return next(value for name, value in weights.items() if name.endswith(end)).float()


def test_bert_without_pooler_and_gpt2_become_classifiers(folders, tokenizer):
    bert = load_classifier(ModelConfig(source=str(folders["bert"])), CLASSES, tokenizer)
    assert {name for name in names(bert) if is_head(bert, name)} == {
        f"{layer}.{part}" for layer in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")
    }
    gpt2 = load_classifier(ModelConfig(source=str(folders["gpt2"])), CLASSES, tokenizer)
    assert {name for name in names(gpt2) if is_head(gpt2, name)} == {"score.weight"}
    rows = torch.tensor([[5, 6, 7, 1, 1], [5, 6, 7, 8, 9]])
    alone = gpt2.eval()(rows[:1, :3]).logits
    torch.testing.assert_close(gpt2(rows, attention_mask=rows.ne(1).long()).logits[:1], alone)


def test_trained_head_is_kept_only_for_the_same_classes_and_refused_in_another_order(fresh, tokenizer, tmp_path):
    trained = load_classifier(fresh("roberta"), CLASSES, tokenizer)
    trained.save_pretrained(tmp_path)
    settings = ModelConfig(source=str(tmp_path))
    same = load_classifier(settings, CLASSES, tokenizer)
    assert torch.equal(same.classifier.out_proj.weight, trained.classifier.out_proj.weight)
    assert same.config.id2label == {0: "negative", 1: "positive"}
    with pytest.raises(UserError, match="has a head for negative, positive, not positive, negative"):
        load_classifier(settings, CLASSES[::-1], tokenizer)
    other = load_classifier(settings, ("a", "b", "c"), tokenizer)
    assert other.classifier.out_proj.weight.shape == (3, 16)
    assert torch.equal(
        other.roberta.encoder.layer[0].output.dense.weight, _stored(trained.state_dict(), "0.output.dense.weight")
    )


def test_gpt2_file_of_the_hub_in_half_precision_is_loaded_as_float32(folders, tokenizer, tmp_path):
    """Names without a prefix, causal masks among the weights, and no lm_head, as in openai-community/gpt2."""
    target = copy(folders["gpt2"], tmp_path, pad_token_id=-1)
    stored = load_file(target / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in stored.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
    save_file({**bare, **masks}, target / "model.safetensors", metadata={"format": "pt"})
    model = load_causal(ModelConfig(source=str(target)), tokenizer)
    assert padding_token(model) == 1, "the tokeniser's"
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, value in stored.items():
        assert value.dtype == torch.float16, name
        assert torch.equal(model.get_parameter(name), value.float()), name


# -- tying, dropout, positions ----------------------------------------------------------------------------------------


def test_untying_copies_the_weight_of_the_head(fresh, folders, tokenizer, tmp_path):
    settings = ModelConfig(source=str(folders["gpt2"]), untie=True)
    tied = load_causal(ModelConfig(source=str(folders["gpt2"])), tokenizer)
    model = load_causal(settings, tokenizer)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, tied.lm_head.weight)
    assert names(model) - names(tied) == {"lm_head.weight"}
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path)
    again = load_causal(ModelConfig(source=str(tmp_path)), tokenizer)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert "lm_head.weight" in names(load_causal(fresh("gpt2", untie=True), tokenizer))


def rates(model) -> dict[str, float]:
    return {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}


def test_dropout_reaches_every_layer_of_each_family(fresh, folders, tokenizer):
    chosen = {"dropout": 0.3, "attention_dropout": 0.2}
    gpt2 = load_causal(fresh("gpt2", **chosen), tokenizer)
    roberta = load_classifier(ModelConfig(source=str(folders["roberta"]), **chosen), CLASSES, tokenizer)
    for model in (gpt2, roberta):
        for name, rate in rates(model).items():
            inside = name.endswith(("attn_dropout", "self.dropout"))
            assert rate == (0.2 if inside else 0.3), name
    assert "classifier.dropout" in rates(roberta)
    assert set(rates(load_causal(fresh("gpt2"), tokenizer)).values()) == {0.1}  # null keeps the default of the model


def test_dropout_that_a_model_lacks_is_refused(fresh, tokenizer):
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    with pytest.raises(UserError, match=r"model\.dropout=0\.1 was given, but a llama model has no such dropout"):
        load_causal(ModelConfig(fresh=True, architecture="llama", shape=shape, dropout=0.1), tokenizer)
    load_causal(ModelConfig(fresh=True, architecture="llama", shape=shape, dropout=0.0), tokenizer)


def test_position_limit(fresh, tokenizer):
    assert position_limit(load_causal(fresh("gpt2"), tokenizer)) == 24
    roberta = load_classifier(fresh("roberta"), CLASSES, tokenizer)
    assert position_limit(roberta) == 24  # two of its 26 positions are unused, as in 512 of 514
    assert position_limit(load_classifier(fresh("bert"), CLASSES, tokenizer)) == 26
    row = torch.full((1, 24), 7)
    roberta(row)
    with pytest.raises((IndexError, RuntimeError)):
        roberta(torch.full((1, 25), 7))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "robrta"}, r"model\.architecture=robrta is not a model type of transformers"),
        ({"shape": {"n_lyer": 2}}, r"model\.shape\.n_lyer is not a key of a gpt2 config \(did you mean n_layer\?\)"),
        ({"shape": {"n_layer": "two"}}, r"model\.shape does not fit a gpt2 \(.*expected int, got str"),
        ({"shape": {"n_embd": 16, "n_head": 3}}, r"model\.architecture=gpt2 cannot be built .*divisible.*model\.shape"),
        ({"shape": {"vocab_size": 50}}, "The tokeniser has 60 tokens, but model.architecture=gpt2 embeds only 50"),
        ({"architecture": "roberta"}, r"\(roberta\) does not predict the next token: give a causal language model"),
        ({"architecture": "bart"}, r"\(bart\) does not predict the next token"),
        ({"architecture": "xlnet"}, "is an XLNet, which needs padding on the left"),
        ({"architecture": "gemma3_text", "shape": {"use_bidirectional_attention": True}}, "does not predict the next"),
        ({"architecture": "vit"}, r"model\.architecture=vit cannot be built .*Unrecognized configuration class"),
        ({"architecture": "gptj"}, r"model\.architecture=gptj cannot be built .*model\.attention=eager"),
        ({"architecture": None}, r"There is no language model to load: give model\.source"),
        ({"fresh": False}, r"There is no language model to load: give model\.source"),
    ],
)
def test_settings_without_a_causal_model_are_refused(tokenizer, changes, message):
    settings = ModelConfig(**{"fresh": True, "architecture": "gpt2", "shape": {}, **changes})
    with pytest.raises(UserError, match=message) as error:
        load_causal(settings, tokenizer)
    assert "\n" not in str(error.value)


def test_tokeniser_with_too_many_tokens_is_refused(folders, tokenizer, tmp_path):
    class Other(list):
        pad_token_id, bos_token_id, eos_token_id = 1, 0, 2

    settings = ModelConfig(source=str(folders["gpt2"]))
    with pytest.raises(UserError, match=r"The tokeniser has 61 tokens, but model\.source=.* embeds only 60"):
        load_causal(settings, Other(range(61)))
    load_causal(settings, Other(range(40)))  # unused rows, as in the embedding of RoBERTa


def test_shape_that_contradicts_the_weights_is_refused(folders, tokenizer):
    source = str(folders["gpt2"])
    load_causal(ModelConfig(source=source, shape={"n_layer": SHAPES["gpt2"]["n_layer"]}), tokenizer)
    with pytest.raises(UserError, match=r"model\.shape\.n_layer=7 contradicts"):
        load_causal(ModelConfig(source=source, shape={"n_layer": 7}), tokenizer)
    load_causal(ModelConfig(source=source, architecture="gpt2"), tokenizer)


def test_folders_without_a_model_are_refused(folders, tokenizer, tmp_path):
    def refused(folder, message):
        with pytest.raises(UserError, match=message) as error:
            load_causal(ModelConfig(source=str(folder)), tokenizer)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)

    refused(tmp_path, "no configuration that transformers can read")
    target = copy(folders["gpt2"], tmp_path)
    (target / "model.safetensors").write_bytes(b"not weights at all")
    refused(target, "cannot be loaded")
    (target / "model.safetensors").unlink()
    refused(target, "cannot be loaded .*no file named model.safetensors")
    (target / "config.json").write_text("{}")
    refused(target, "no configuration that transformers can read .*model_type")
    (target / "config.json").write_text("{")
    refused(target, "no configuration that transformers can read .*valid JSON")


def test_missing_weights_are_refused(fresh, folders, tokenizer, tmp_path):
    deeper = copy(folders["roberta"], tmp_path, num_hidden_layers=3)
    with pytest.raises(
        UserError, match=r"no weights for 'roberta.encoder.layer.2.* and 15 more of a RobertaForSequence"
    ):
        load_classifier(ModelConfig(source=str(deeper)), CLASSES, tokenizer)
    wider = copy(folders["gpt2"], tmp_path / "wider", n_embd=20)
    with pytest.raises(UserError, match=r"weights of another shape for 'transformer.*of a GPT2LMHeadModel"):
        load_causal(ModelConfig(source=str(wider)), tokenizer)
    other = copy(folders["bert"], tmp_path / "other", model_type="roberta")
    with pytest.raises(UserError, match="no weights for 'roberta"):
        load_classifier(ModelConfig(source=str(other)), CLASSES, tokenizer)
