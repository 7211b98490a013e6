"""A model name is a folder, a repository of the hub or one in its cache; others are refused in one sentence."""

import pytest

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer, locate
from groupwise.models.language import load_causal


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """The hub is unreachable, and retries do not wait."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: None)


def test_unreachable_hub_is_reported(tokenizer):
    said = "^some/model is not on this machine, and the Hugging Face hub cannot be reached: .*model.source=FOLDER"
    with pytest.raises(UserError, match=said):
        load_causal(ModelConfig(source="some/model"), tokenizer)
    with pytest.raises(UserError, match=said):
        load_tokenizer("some/model")


def test_missing_folder_is_reported():
    with pytest.raises(UserError, match=r"/no/such/folder has no readable tokeniser"):
        load_tokenizer("/no/such/folder")


def test_missing_project_model_is_not_requested_from_the_hub():
    with pytest.raises(UserError, match=r"pretrained/none is a model of this project.*make pretrained"):
        locate("model.source", "pretrained/none")


def test_cache_is_used_if_the_hub_is_unreachable(tmp_path, folders, tokenizer, monkeypatch):
    """The hub's own layout: models--name/snapshots/revision, and refs/main with the revision."""
    revision = "0" * 40
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / revision).symlink_to(folders["gpt2"], target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_causal(ModelConfig(source="some/model"), tokenizer).config.n_embd == 16
