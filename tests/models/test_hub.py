"""A name is a folder, or on the hub, or in its cache; anything else is refused in one sentence."""

import pytest

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer, locate
from groupwise.models.language import load_causal


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Nobody listens where the hub should be, and nobody sleeps between tries."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: None)


def test_a_hub_out_of_reach_is_told(tokenizer):
    with pytest.raises(
        UserError, match=r"model\.source=some/model has no configuration that transformers can read"
    ) as told:
        load_causal(ModelConfig(source="some/model"), tokenizer)
    assert "\n" not in str(told.value)


def test_a_folder_that_is_not_there_is_told():
    with pytest.raises(UserError, match=r"/no/such/folder has no readable tokeniser"):
        load_tokenizer("/no/such/folder")


def test_a_model_of_our_own_that_is_gone_is_not_asked_for_at_the_hub():
    with pytest.raises(UserError, match=r"pretrained/none is a model of this project.*make pretrained"):
        locate("model.source", "pretrained/none")


def test_the_cache_serves_while_the_hub_is_out_of_reach(tmp_path, folders, tokenizer, monkeypatch):
    """The hub's own layout: models--name/snapshots/revision, and refs/main with the revision."""
    revision = "0" * 40
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / revision).symlink_to(folders["gpt2"], target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_causal(ModelConfig(source="some/model"), tokenizer).config.n_embd == 16
