"""Text classification: exact clipped sums with padding, order by length, metrics, truncation and export."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import attach, per_layer, verify
from groupwise.config.schema import DataConfig, ModelConfig, RunConfig
from groupwise.data.text_examples import Labelled
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer
from groupwise.tasks import make_task
from groupwise.tasks.text_classification import encode
from groupwise.training.step import Trainer
from tests.models.conftest import SHAPES
from tests.tasks.clipped import MODES, check_sums, in_float64

CPU = torch.device("cpu")
ROBERTA = SHAPES["roberta"] | {"max_position_embeddings": 66}
EXAMPLES = [0, 3, 7, 12, 20]
FRESH = {"fresh": True, "dropout": 0.0, "attention_dropout": 0.0}


def config(task="sst2", model=(), data=(), **changes) -> RunConfig:
    named = {"name": "roberta_tiny", "source": "pretrained/roberta_mini", "architecture": "roberta", "shape": ROBERTA}
    settings = {"name": "synthetic", "train_limit": 60, "max_length": 64}
    return RunConfig(
        task=task, model=ModelConfig(**FRESH | named | dict(model)), data=DataConfig(**settings | dict(data)), **changes
    )


@pytest.fixture(scope="module")
def sst2():
    return in_float64(config())


@pytest.fixture(scope="module")
def mnli():
    return in_float64(config("mnli"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sst2", "mnli"])
def test_clipped_sums_match_single_examples(name, mode, request):
    check_sums(request.getfixturevalue(name), EXAMPLES, mode)


def test_order_by_length_reduces_padding(sst2):
    drawn = np.random.default_rng(0).permutation(60)
    ordered = sst2.order(drawn)
    assert sorted(ordered) == sorted(drawn)
    lengths = sst2._train.lengths[ordered]
    assert (np.diff(lengths) <= 0).all()
    same = drawn[sst2._train.lengths[drawn] == lengths[30]]
    assert ordered[lengths == lengths[30]].tolist() == same.tolist(), "equal lengths keep their drawn order"

    def padded(examples):
        return sum(8 * int(sst2._train.lengths[part].max()) for part in np.split(examples[:56], 7))

    assert padded(ordered) < 0.8 * padded(drawn)


def test_metrics_match_a_plain_loop(mnli):
    found = Trainer(mnli, None, None).evaluate("valid", batch_size=16, limit=30)
    for name, part in mnli._valid.items():
        ending = f"_{name}" if name else ""
        right, losses = 0, []
        with torch.no_grad():
            for i in range(30):
                logits = mnli.model(torch.from_numpy(part.tokens[i]).long()[None]).logits
                losses.append(float(F.cross_entropy(logits, torch.tensor(part.labels[i : i + 1]))))
                right += int(logits.argmax()) == part.labels[i]
        assert found[f"accuracy{ending}"] == pytest.approx(100 * right / 30)
        assert found[f"loss{ending}"] == pytest.approx(sum(losses) / 30)
    assert set(found) == {"accuracy", "loss", "accuracy_mismatched", "loss_mismatched"}
    assert set(Trainer(mnli, None, None).evaluate("train", 16, limit=5)) == {"accuracy", "loss"}
    assert mnli.model.training


def test_dropout_is_on_in_training_and_off_in_evaluation():
    task = make_task(config(model={"dropout": 0.5}), CPU)
    assert not torch.equal(task.losses_of([0, 1]), task.losses_of([0, 1]))
    assert Trainer(task, None, None).evaluate("valid", 50) == Trainer(task, None, None).evaluate("valid", 50)


def test_bert_gets_its_token_types(tmp_path):
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the"]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path)
    shape = {**ROBERTA, "max_position_embeddings": 64, "type_vocab_size": 2}
    task = make_task(config("qnli", {"source": str(tmp_path), "architecture": "bert", "shape": shape}), CPU)
    assert {int(kind) for row in task._train.types for kind in row} == {0, 1}
    together = task.losses_of(EXAMPLES)
    torch.testing.assert_close(torch.cat([task.losses_of([i]) for i in EXAMPLES]), together)
    with attach(task.model, per_layer(task.model), 0.1) as engine:
        verify(engine, task.losses_of, EXAMPLES, 1e-3)


def test_long_texts_are_cut_and_counted():
    tokenizer = make_task(config(), CPU).tokenizer
    texts = [("so", None), ("a very long sentence that does not fit", None)]
    short, long = tokenizer([first for first, _ in texts])["input_ids"]
    encoded = encode(Labelled(texts, [1, 0]), tokenizer, 6)
    assert encoded.cut == 1
    assert encoded.tokens[0].tolist() == short
    assert encoded.tokens[1].tolist() == [*long[:5], tokenizer.sep_token_id]
    pair = encode(Labelled([(texts[0][0], texts[1][0])], [0]), tokenizer, 10)
    assert pair.tokens[0].tolist()[: len(short)] == short, "the longer text is cut"
    assert pair.lengths.tolist() == [10]
    with pytest.raises(UserError, match="has no token of this tokeniser"):
        encode(Labelled([("", None)], [0]), load_tokenizer("pretrained/gpt2_mini"), 10)


def test_data_description_has_sizes_lengths_and_cuts(sst2):
    found = sst2.describe_data()
    assert (found["train_examples"], found["valid_examples"]) == (60, 40) == (sst2.train_size, len(sst2._valid[""]))
    assert found["longest"] == sst2._train.lengths.max() and found["max_length"] == 64
    assert found["cut_examples"] == found["cut_examples_valid"] == 0
    assert "made up" in found["generated"] and found["sha256"] and found["source"]
    short = make_task(config(data={"max_length": 12}), CPU).describe_data()
    assert short["cut_examples"] > 0 and short["longest"] == 12


def test_export_is_a_folder_that_transformers_reads(tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    task = make_task(config("mnli"), CPU)
    task.model.eval()
    task.export(tmp_path / "out", {"hash": "abc"})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
    inputs = task.inputs([task._train.tokens[i] for i in EXAMPLES], CPU)
    torch.testing.assert_close(model(**inputs).logits, task.logits(task.model, inputs))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("A film", "Good.")["input_ids"] == task.tokenizer("A film", "Good.")["input_ids"]
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["hash"] == "abc" and list(provenance["sha256"]) == ["model.safetensors"]
