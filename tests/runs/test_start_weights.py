"""A run starts from the weights of an earlier run, also with another number of stages."""

import pytest
import torch

from groupwise.config.identity import save_config
from groupwise.config.schema import ModelConfig, RunConfig
from groupwise.errors import UserError
from groupwise.models.image_networks import WideResNet
from groupwise.pipeline.split import cut
from groupwise.run import refuse_other_tokens, start_from
from groupwise.training.checkpoint import save_checkpoint
from tests.pipeline.tiny import gpt2

BLOCKS = 3


def image_model(seed):
    torch.manual_seed(seed)
    return WideResNet(
        depth=10, width=1, num_classes=3, in_channels=1, norm_groups=4,
        weight_standardization=True,
    )  # fmt: skip


def text_model(seed):
    torch.manual_seed(seed)
    return gpt2(BLOCKS, tie_word_embeddings=False)


def test_weights_of_three_stages_start_two_stages_and_a_whole_model(tmp_path):
    whole = text_model(0).state_dict()
    for index in range(BLOCKS):
        stage = cut(text_model(0), tuple((i, i + 1) for i in range(BLOCKS)), index)
        names = stage.names
        save_checkpoint(tmp_path / f"model-{index}.pt", {names[n]: t for n, t in stage.state_dict().items()})
    other = text_model(1)
    start_from(other, str(tmp_path))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in other.state_dict().items())
    for index in range(2):
        stage = cut(text_model(1), ((0, 2), (2, BLOCKS)), index)
        start_from(stage, str(tmp_path / "model.pt"))
        assert all(torch.equal(tensor, whole[stage.names[name]]) for name, tensor in stage.state_dict().items())


def test_folders_without_weights_and_weights_of_another_model_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no model\.pt"):
        start_from(image_model(0), str(tmp_path))
    weights = image_model(0).state_dict()
    save_checkpoint(tmp_path / "model.pt", {name: t for name, t in weights.items() if not name.startswith("stem")})
    with pytest.raises(UserError, match=r"has no stem.*: give the weights of the same model"):
        start_from(image_model(0), str(tmp_path))
    nan, sparse, short = (weights["stem.weight"] * torch.nan, weights["stem.weight"].to_sparse(), torch.zeros(3))
    for broken, words in (
        (nan, "NaN or infinite"),
        (sparse, "does not fit this"),
        ("text", "does not fit this"),
        (short, "size mismatch"),
    ):
        save_checkpoint(tmp_path / "model.pt", {**weights, "stem.weight": broken})
        with pytest.raises(UserError, match=words):
            start_from(image_model(0), str(tmp_path))


def test_weights_of_a_run_with_another_tokeniser_are_refused(tmp_path):
    dart, e2e = (ModelConfig(source=f"pretrained/gpt2_midi_{task}") for task in ("dart", "e2e"))
    (tmp_path / "config.yaml").write_text(save_config(RunConfig(model=dart)))
    refuse_other_tokens(dart, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"has other tokens: give model.tokenizer=pretrained/gpt2_midi_dart"):
        refuse_other_tokens(e2e, tmp_path)
