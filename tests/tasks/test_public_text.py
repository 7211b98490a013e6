"""A run names the public text behind its weights and tokeniser, and refuses ones made from its own training file."""

import json
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run
from groupwise.config.schema import ClipConfig, PathsConfig, RunConfig
from groupwise.data.text_examples import sha256_of_files
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer
from groupwise.tasks import make_task
from tests.tasks.test_text_generation import CPU, config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A private E2E training set, and a saved tokeniser."""
    (tmp_path / "e2e").mkdir()
    rows = [f'"name[Inn {a}], area[{b}]",Inn {a} lies {b}.' for a in range(5) for b in range(5)]
    for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"):
        (tmp_path / "e2e" / name).write_text("\n".join(["mr,ref", *(rows if name == "trainset.csv" else rows[:3])]))
    load_tokenizer("pretrained/gpt2_midi_e2e").save_pretrained(tmp_path / "model")
    return tmp_path


def settings(data: Path, clip: str = "layer", fresh: bool = True) -> RunConfig:
    model = {"source": str(data / "model"), "fresh": fresh}
    given = {"paths": PathsConfig(data=str(data)), "clip": ClipConfig(grouping=clip)}
    return config("e2e", model, {"name": "files"}, **given)


def test_public_text_is_named_and_own_training_file_refused(data):
    record = data / "model" / "vocabulary.json"
    record.write_text(json.dumps({"sha256": {"public.json": "0" * 64}}))
    assert make_task(settings(data), CPU).describe_data()["public_text"] == "vocabulary from public.json"
    record.write_text(json.dumps({"sha256": sha256_of_files([data / "e2e" / "trainset.csv"], data / "e2e")}))
    with pytest.raises(UserError, match=r"vocabulary of .* come from trainset\.csv, which this run should"):
        make_task(settings(data), CPU)
    assert make_task(settings(data, clip="none"), CPU).train_size == 25, "without privacy it is accepted"


def test_weights_from_the_private_file_are_refused(data):
    digests = sha256_of_files([data / "e2e" / "trainset.csv"], data)
    (data / "model" / "provenance.json").write_text(json.dumps({"data": {"sha256": digests}}))
    with pytest.raises(UserError, match=r"weights of .* come from e2e/trainset\.csv"):
        make_task(settings(data, fresh=False), CPU)


@pytest.mark.parametrize("task", ["e2e", "dart"])
def test_committed_vocabulary_was_not_made_from_the_texts_of_its_task(task):
    """For DART this covers the part that scale=midi trains on."""
    source = str(compose_run([f"task={task}", "scale=midi"], ROOT / "conf").model.source)
    held = json.loads((ROOT / source / "vocabulary.json").read_text())
    assert len(load_tokenizer(source)) == held["tokens"]
    own = {"e2e": ("trainset", "devset", "testset"), "dart": ("webnlg", "dart")}[task]
    assert not any(name.startswith(own) for name in held["sha256"])
