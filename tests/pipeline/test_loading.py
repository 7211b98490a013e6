"""A stage loaded from files equals the stage cut from the whole model, and reads nothing else."""

import json
import math
from functools import partial

import pytest
import safetensors
import torch

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer
from groupwise.models.language import load_causal
from groupwise.models.trainable import choose_trainable
from groupwise.pipeline.loading import load_stage
from groupwise.pipeline.split import choose_ranges, cut
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # before transformers, whose import fails otherwise
CPU = torch.device("cpu")
BLOCKS = 4
SIZES = {"hidden_size": 8, "num_hidden_layers": BLOCKS, "num_attention_heads": 2, "max_position_embeddings": 16}
SHAPES = {
    "gpt2": {"n_embd": 8, "n_layer": BLOCKS, "n_head": 2, "n_positions": 16},
    "opt": SIZES | {"ffn_dim": 16, "word_embed_proj_dim": 6},
    "llama": SIZES | {"intermediate_size": 12},
}
TARGETS = {"gpt2": ["c_attn", "c_proj"], "opt": ["q_proj", "v_proj"], "llama": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pretrained/gpt2_mini")


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Each model in one file and in shards of a few tensors."""
    paths = {}
    for kind, shape in SHAPES.items():
        torch.manual_seed(0)
        settings = ModelConfig(source="pretrained/gpt2_mini", fresh=True, architecture=kind, shape=shape)
        model = load_causal(settings, tokenizer)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        for shards, size in (("one file", "1GB"), ("shards", "3KB")):
            paths[kind, shards] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(paths[kind, shards], max_shard_size=size)
        assert len(list(paths[kind, "shards"].glob("*.safetensors"))) > 4
    return paths


def lora(kind, folder, **changes):
    adapters = LoraConfig(rank=2, targets=TARGETS[kind])
    return ModelConfig(source=str(folder), trains="lora", lora=adapters, dropout=0.0, attention_dropout=0.0, **changes)


def loaded(settings, tokenizer, index, stages=3, seed=5, **options):
    choose = partial(choose_ranges, stages=stages, by_hand=[1, 2, 1] if stages == 3 else ())
    return load_stage(settings, tokenizer, choose, index, seed=seed, device=CPU, **options)


def cut_whole(settings, tokenizer, index, adapters=None, stages=3):
    """The stage cut from the whole model, with the given adapters."""
    model = choose_trainable(load_causal(settings, tokenizer), settings)
    stage = cut(model, choose_ranges(model, stages, by_hand=[1, 2, 1] if stages == 3 else ()), index)
    stage.load_state_dict({k: v for k, v in (adapters or {}).items() if ".lora_" in k}, strict=False)
    return stage


def assert_equal(found, wanted):
    assert dict(found.named_parameters()).keys() == dict(wanted.named_parameters()).keys()
    assert found.names == wanted.names and found.training == wanted.training
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad, name
        assert torch.equal(one, other), name
    for (name, one), other in zip(found.named_buffers(), wanted.buffers(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), name


@pytest.fixture
def read(monkeypatch):
    """The names of all tensors that are read, in order."""
    names = []
    real = safetensors.safe_open

    class Spy:
        def __init__(self, *args, **kwargs):
            self._file = real(*args, **kwargs)

        def keys(self):
            return self._file.keys()

        def get_tensor(self, name):
            names.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Spy)
    return names


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("shards", ["one file", "shards"])
def test_a_stage_equals_that_of_the_whole_model_and_reads_nothing_else(kind, shards, folders, tokenizer, read):
    settings = lora(kind, folders[kind, shards])
    for index in range(3):
        read.clear()
        stage = loaded(settings, tokenizer, index)
        names = {n.removeprefix("base_model.model.").replace(".base_layer.", ".") for n in stage.names.values()}
        own = {name for name in names if ".lora_" not in name}
        if kind != "llama" and index == 2:  # the head is the embedding, which is in the files under one name
            own = own - {"lm_head.weight"} | {
                "transformer.wte.weight" if kind == "gpt2" else "model.decoder.embed_tokens.weight"
            }
        assert sorted(read) == sorted(own)
        assert_equal(stage, cut_whole(settings, tokenizer, index, stage.state_dict()))
    ids, kwargs = torch.randint(0, 99, (2, 8)), {"position_ids": torch.arange(8).expand(2, 8)}
    whole, x = loaded(settings, tokenizer, 0, stages=1), ids
    for index in range(3):
        x = loaded(settings, tokenizer, index).hidden(x, **kwargs)
    torch.testing.assert_close(x, whole.hidden(ids, **kwargs))


def test_adapters_are_initialised_as_by_peft_for_any_number_of_stages(folders, tokenizer):
    settings = lora("gpt2", folders["gpt2", "shards"])
    found = {}
    for stages in (1, 3):
        values = {}
        for index in range(stages):
            stage = loaded(settings, tokenizer, index, stages)
            values |= {stage.names[name]: p.detach() for name, p in stage.named_parameters() if ".lora_" in name}
        found[stages] = values
    assert found[1].keys() == found[3].keys() and len(found[1]) == 6 * BLOCKS
    for name, value in found[1].items():
        assert torch.equal(value, found[3][name])
        assert (
            not value.any() if ".lora_B." in name else 0.5 < float(value.abs().max()) * math.sqrt(value.shape[1]) <= 1
        )
    starts = [value for name, value in found[1].items() if "c_attn.lora_A." in name]
    assert not any(torch.equal(one, other) for i, one in enumerate(starts) for other in starts[:i])
    other = loaded(settings, tokenizer, 0, stages=1, seed=6)
    assert not torch.equal(next(p for n, p in other.named_parameters() if "lora_A" in n), starts[0])


def test_frozen_weights_may_have_half_precision(folders, tokenizer):
    settings = lora("gpt2", folders["gpt2", "one file"], frozen_dtype="bfloat16")
    for index in range(3):
        stage = loaded(settings, tokenizer, index)
        assert stage.dtype is torch.bfloat16
        assert_equal(stage, cut_whole(settings, tokenizer, index, stage.state_dict()))


def test_all_weights_can_train_where_the_head_is_untied(folders, tokenizer):
    settings = ModelConfig(source=str(folders["gpt2", "shards"]), untie=True)
    for index in range(3):
        assert_equal(loaded(settings, tokenizer, index), cut_whole(settings, tokenizer, index))
    tied = ModelConfig(source=str(folders["gpt2", "shards"]))
    stage = loaded(tied, tokenizer, 0, stages=1)
    assert stage.head.weight is stage.body.wte.weight
    with pytest.raises(UserError, match="at once, as token embedding and head"):
        loaded(tied, tokenizer, 0)


def test_tensor_names_without_the_models_prefix_are_found(folders, tokenizer, tmp_path):
    from safetensors.torch import load_file, save_file

    source = folders["gpt2", "one file"]
    weights = load_file(source / "model.safetensors")
    save_file({n.removeprefix("transformer."): w for n, w in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for index in range(3):
        found = loaded(lora("gpt2", tmp_path), tokenizer, index)
        assert_equal(found, loaded(lora("gpt2", source), tokenizer, index))


def test_an_incomplete_folder_is_refused(folders, tokenizer, tmp_path):
    source = folders["gpt2", "shards"]
    settings = ModelConfig(source=str(tmp_path), untie=True)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"has weights that cannot be read .*: copy the folder again"):
        loaded(settings, tokenizer, 0)
    (tmp_path / "model.safetensors").unlink()
    for file in source.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["transformer.ln_f.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded(settings, tokenizer, 0)
    with pytest.raises(UserError, match=r"has no weights for 'transformer.ln_f.weight'"):
        loaded(settings, tokenizer, 2)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_positions": 24}))
    with pytest.raises(UserError, match=r"has weights of another shape for 'transformer.wpe.weight'"):
        loaded(settings, tokenizer, 0)
