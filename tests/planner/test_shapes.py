"""Known models have the parameters that their papers give them, and none of them is allocated."""

import pytest

from groupwise.errors import UserError
from groupwise.pipeline.stage import with_blocks
from groupwise.planner.shapes import build, configuration


@pytest.mark.parametrize(
    ("name", "blocks", "width", "heads", "billions"),
    [
        ("gpt3_175b", 96, 12288, 96, 175),
        ("opt_66b", 64, 9216, 72, 66),
        ("opt_175b", 96, 12288, 96, 175),
        ("gpt2_xl", 48, 1600, 25, 1.558),
        ("llama_7b", 32, 4096, 32, 6.738),
    ],
)
def test_a_known_shape_has_its_blocks_and_parameters(name, blocks, width, heads, billions):
    config = configuration(name)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (blocks, width, heads)
    model = build(config, rank=32, dtype="bfloat16")
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen == pytest.approx(billions * 1e9, rel=0.01)
    assert all(p.device.type == "meta" for p in model.parameters())


def test_adapters_of_gpt3_are_counted_by_hand():
    """On c_attn, d → 3d: rank x (d + 3d) numbers in each of 96 blocks, in float32 beside half precision."""
    model = build(configuration("gpt3_175b"), rank=32, dtype="bfloat16")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 96 * 32 * 4 * 12288
    assert {str(p.dtype) for p in trained} == {"torch.float32"}
    assert {str(p.dtype) for p in model.parameters() if not p.requires_grad} == {"torch.bfloat16"}


def test_rank_0_trains_everything_and_unties_the_head():
    model = build(with_blocks(configuration("gpt2_xl"), 0, 1), rank=0, dtype="float32")
    assert all(p.requires_grad and str(p.dtype) == "torch.float32" for p in model.parameters())
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_a_folder_is_read(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=3, n_embd=16, n_head=2, resid_pdrop=0.1).save_pretrained(tmp_path)
    config = configuration(str(tmp_path))
    assert (config.num_hidden_layers, config.hidden_size, config.resid_pdrop) == (3, 16, 0.0)


@pytest.mark.parametrize("name", ["gpt3", "no/such/folder"])
def test_an_unknown_model_is_refused(name):
    with pytest.raises(UserError, match=rf"no shape or folder with a config.json named {name}"):
        configuration(name)


def test_a_folder_that_transformers_cannot_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match=r"transformers cannot read the config\.json"):
        configuration(str(tmp_path))
