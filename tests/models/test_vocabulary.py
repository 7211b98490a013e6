"""A small vocabulary: the same bytes for the same texts, of public texts alone; a private file is refused."""

import json
import os
from pathlib import Path

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.config.schema import DataConfig, EvalConfig, GenerateConfig, ModelConfig, PathsConfig, RunConfig
from groupwise.data.text import read_corpus
from groupwise.data.text_examples import sha256_of_files
from groupwise.errors import UserError
from groupwise.models.hub import END_OF_TEXT, load_tokenizer
from groupwise.models.vocabulary import RECORD, main, train_vocabulary, write_vocabulary
from groupwise.tasks import make_task

ROOT = Path(__file__).parents[2]
SIZE = 300
TEXT = "the inn by the river serves cheap food and is family friendly in the city centre"
WORDS = TEXT.split()
PRIVATE = "zebrawoodhouse"
SHAPE = {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 128}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A private training set with a word of its own, in every row, and public text beside it."""
    (tmp_path / "e2e").mkdir()
    rows = [f'"name[{PRIVATE} {a}], area[{b}]",{PRIVATE} {a} lies {b}.' for a in WORDS[:5] for b in WORDS[5:10]]
    for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"):
        shared = rows if name == "trainset.csv" else rows[:3]
        (tmp_path / "e2e" / name).write_text("\n".join(["mr,ref", *shared]))
    entry = {"tripleset": [["Inn", "AREA", "city centre"]], "annotations": [{"text": TEXT}]}
    (tmp_path / "public.json").write_text(json.dumps([entry] * 30))
    (tmp_path / "public.txt").write_text(" ".join(WORDS * 3) + "\n\n" + " ".join(reversed(WORDS)))
    return tmp_path


def config(data: Path, vocabulary: Path, clip: str = "layer") -> RunConfig:
    made = RunConfig(
        task="e2e",
        model=ModelConfig(name="gpt2", source=str(vocabulary), fresh=True, architecture="gpt2", shape=SHAPE),
        data=DataConfig(name="files", max_length=100),
        eval=EvalConfig(generate=GenerateConfig(max_new_tokens=4, limit=1)),
        paths=PathsConfig(data=str(data)),
    )
    made.clip.grouping = clip
    return made


def test_equal_texts_give_equal_bytes(data, tmp_path):
    for name in ("a", "b"):
        assert write_vocabulary(tmp_path / name, SIZE, [data / "public.json", data / "public.txt"])
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json", RECORD]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert len(tokenizer) == SIZE and tokenizer.eos_token_id == SIZE - 1
    pair = f"Inn : area{END_OF_TEXT} The café."
    assert tokenizer.decode(tokenizer(pair)["input_ids"]) == pair and SIZE - 1 in tokenizer(pair)["input_ids"]


def test_a_word_of_the_private_texts_alone_is_no_token(data, tmp_path):
    """It would be one if they were counted: they say it in every row."""

    def longest_piece(*texts: Path) -> int:
        tokenizer = train_vocabulary(read_corpus(texts, END_OF_TEXT), SIZE)
        return max(len(tokenizer.decode([token]).strip()) for token in tokenizer(f" {PRIVATE}")["input_ids"])

    assert longest_piece(data / "public.json", data / "public.txt") < 4
    assert longest_piece(data / "public.json", data / "e2e" / "trainset.csv") > 8


def test_a_run_says_its_public_texts_and_refuses_its_own_training_file(data, tmp_path):
    public, leaky = tmp_path / "public", tmp_path / "leaky"
    write_vocabulary(public, SIZE, [data / "public.json"])
    write_vocabulary(leaky, SIZE, [data / "public.json", data / "e2e" / "trainset.csv"])
    cpu = torch.device("cpu")
    assert make_task(config(data, public), cpu).describe_data()["public_text"] == "vocabulary from public.json"
    with pytest.raises(UserError, match=r"vocabulary of .* were made from trainset\.csv, which this run is to keep"):
        make_task(config(data, leaky), cpu)
    assert make_task(config(data, leaky, clip="none"), cpu).train_size == 25, "which claims nothing"


def test_weights_from_the_private_file_are_refused_too(data, tmp_path):
    folder = tmp_path / "weights"
    write_vocabulary(folder, SIZE, [data / "public.txt"])
    digests = sha256_of_files([data / "e2e" / "trainset.csv"], data)
    (folder / "provenance.json").write_text(json.dumps({"data": {"sha256": digests}}))
    settings = config(data, folder)
    settings.model.fresh = False
    with pytest.raises(UserError, match=r"weights of .* were made from e2e/trainset\.csv"):
        make_task(settings, torch.device("cpu"))


@pytest.mark.parametrize(("size", "says"), [(257, "holds only bytes"), (5000, "give more text")])
def test_sizes_that_the_texts_cannot_fill_are_refused(data, tmp_path, capsys, size, says):
    assert main([str(tmp_path / "out"), str(size), str(data / "public.txt")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["e2e", "dart"])
def test_the_kept_vocabulary_of_a_task_was_not_made_from_its_own_texts(task):
    """Of DART, the part that scale=midi trains on."""
    source = str(compose_run([f"task={task}", "scale=midi"], ROOT / "conf").model.source)
    held = json.loads((ROOT / source / RECORD).read_text())
    assert len(load_tokenizer(source)) == held["tokens"]
    own = {"e2e": ("trainset", "devset", "testset"), "dart": ("webnlg", "dart")}[task]
    assert not any(name.startswith(own) for name in held["sha256"])


@pytest.mark.slow
@pytest.mark.skipif("GROUPWISE_DATA" not in os.environ, reason="needs the data")
@pytest.mark.parametrize("task", ["e2e", "dart"])
def test_the_kept_vocabulary_can_be_made_again(task, tmp_path):
    root = Path(os.environ["GROUPWISE_DATA"])
    folder = ROOT / "pretrained" / f"gpt2_midi_{task}"
    held = json.loads((folder / RECORD).read_text())
    texts = [next(root.glob(f"*/{name}"), root / name) for name in held["sha256"]]
    if not all(text.is_file() for text in texts):
        pytest.skip("needs the public texts")
    write_vocabulary(tmp_path, held["tokens"], texts)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_it_is_trained_again_only_for_other_texts_or_another_size(data, tmp_path):
    given = (tmp_path / "out", SIZE), [data / "public.txt"]
    assert [write_vocabulary(*given[0], given[1]) for _ in range(2)] == [True, False]
    assert write_vocabulary(tmp_path / "out", SIZE - 5, given[1])
    (data / "public.txt").write_text(" ".join(WORDS * 3) + " and a bar")
    assert write_vocabulary(tmp_path / "out", SIZE - 5, given[1])
