"""A name is a folder, or on the hub, or in its cache; anything else is refused at once, in one sentence."""

import pytest

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError
from groupwise.models.hub import locate
from groupwise.models.language import load_causal


@pytest.fixture
def no_hub(monkeypatch):
    """Nobody listens where the hub should be."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def slept(monkeypatch):
    """Seconds that were slept between tries, none of them in truth."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def test_a_hub_out_of_reach_is_told_within_seconds(no_hub, slept):
    with pytest.raises(
        UserError, match=r"model\.source=some/model is not a folder, and the hub cannot be reached"
    ) as told:
        locate("model.source", "some/model")
    assert sum(slept) < 5
    assert "model.source=FOLDER" in str(told.value)
    assert "model.fresh=true" in str(told.value)
    assert "\n" not in str(told.value)


def test_no_name_is_spelt_like_a_path():
    with pytest.raises(UserError, match=r"nor a valid name on the hub: give model\.tokenizer=FOLDER"):
        locate("model.tokenizer", "/no/such/folder")


def test_a_model_of_our_own_that_is_gone_is_not_asked_for_at_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)  # would show any name
    with pytest.raises(UserError, match=r"pretrained/none is one of this project's models.*make pretrained"):
        locate("model.source", "pretrained/none")


@pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "RemoteEntryNotFoundError", "GatedRepoError"])
def test_a_name_that_the_hub_does_not_show(monkeypatch, kind):
    from huggingface_hub import errors

    def refuse(*_, **__):
        error = getattr(errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    with pytest.raises(UserError, match="the hub has no public model of that name"):
        locate("model.source", "some/model")


def test_the_cache_serves_while_the_hub_is_out_of_reach(
    tmp_path, folders, tokenizer, monkeypatch, no_hub, capfd, slept
):
    """The hub's own layout: models--name/snapshots/revision, and refs/main with the revision."""
    revision = "0" * 40
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / revision).symlink_to(folders["gpt2"], target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_causal(ModelConfig(source="some/model"), tokenizer).config.n_embd == 16
    assert sum(slept) < 5
    assert not any(capfd.readouterr())  # nobody was asked again


def test_a_name_that_the_hub_shows(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    assert locate("model.source", "some/model") == "some/model"
