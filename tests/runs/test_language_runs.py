"""Whole runs of language tasks at scale=smoke: every clipping mode, in-context learning, and refused settings."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.run import run
from tests.made_up import made_up_once
from tests.rdp_alone import rdp_alone

ROOT = Path(__file__).resolve().parents[2]
CLASSIFICATION, GENERATION = ("sst2", "qnli", "qqp", "mnli"), ("e2e", "dart", "samsum")
MODES = ("none", "flat", "ghost", "fixed_layer", "adaptive_layer")
QUICK = {("sst2", "flat"), ("qnli", "ghost"), ("qqp", "fixed_layer"), ("mnli", "adaptive_layer")} | {
    ("samsum", "flat"),
    ("dart", "ghost"),
    ("e2e", "adaptive_layer"),
}
"""Every task, and every mode that clips; `none` runs in tests below. The others are slow."""


@pytest.fixture(scope="module", autouse=True)
def _by_rdp_alone():
    """Epsilon does not depend on the task, and runs on images use the default accountant."""
    with rdp_alone():
        yield


@pytest.fixture
def little_text() -> Iterator[None]:
    """A tenth of the synthetic text, for tests in which nothing is learned from it."""
    with made_up_once(TRAIN=200, VALID=40, REQUESTS=8):
        yield


def smoke(tmp_path: Path, task: str, *overrides: str):
    quick = ["scale=smoke", f"paths.results={tmp_path}", "privacy.accountant=rdp"]
    return compose_run([f"task={task}", *quick, *overrides], ROOT / "conf")


def folder_of(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        pytest.param(task, mode, marks=[] if (task, mode) in QUICK else pytest.mark.slow)
        for task in (*CLASSIFICATION, *GENERATION)
        for mode in MODES
    ],
)
def test_every_task_trains_in_every_mode(little_text, tmp_path, task, mode, capsys):
    small = ["eval.train_limit=4"] if task in CLASSIFICATION else ["train.batch_size=4", "eval.train_limit=4"]
    row = run(smoke(tmp_path, task, f"clip={mode}", "train.steps=2", *small))
    folder = folder_of(tmp_path)
    assert (folder / "DONE").exists() and row["plan.steps"] == 2
    assert row["plan.private"] is (mode != "none")
    if mode != "none":
        assert row["plan.spent_epsilon"] <= 8.0
    assert "made up by groupwise" in capsys.readouterr().out
    if task in CLASSIFICATION:
        assert 0 <= row["valid/accuracy"] <= 100
        assert ("valid/accuracy_mismatched" in row) == (task == "mnli")
    else:
        assert {"valid/perplexity", "test/perplexity", "test/rougeL"} <= row.keys()
        lines = (folder / "outputs-test.jsonl").read_text().splitlines()
        assert len(lines) == 4 and {"source", "output", "references"} == json.loads(lines[0]).keys()


@pytest.mark.parametrize("task", [pytest.param("mnli", marks=pytest.mark.slow), "e2e"])
def test_flat_and_ghost_clipping_give_the_same_loss_for_any_microbatch(little_text, tmp_path, task):
    common = [
        "model.dropout=0",
        "model.attention_dropout=0",
        "debug.noise_seed=3",
        "clip.formula=materialize",
        "privacy.epsilon=50",
        "train.steps=1",
        "eval.generate.limit=0",
        "train.batch_size=8",
        "train.sample_rate=null",
        "data.max_length=32",
        "eval.train_limit=4",
    ]
    losses = [
        run(smoke(tmp_path, task, *common, mode, f"train.microbatch={size}"))["valid/loss"]
        for mode, size in (("clip=flat", 64), ("clip=flat", 3), ("clip=ghost", 5))
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_synthetic_sentiment_is_learned(tmp_path):
    row = run(
        smoke(tmp_path, "sst2", "clip=none", "data.train_limit=1000", "train.steps=60", "optim.learning_rate=5e-3")
    )
    assert row["valid/accuracy"] > 65  # 50 is chance


def test_delta_and_batch_follow_the_number_of_examples(little_text, tmp_path):
    row = run(smoke(tmp_path, "sst2", "clip=flat", "train.steps=1", "data.train_limit=80"))
    assert row["plan.delta"] == pytest.approx(80**-1.1)
    assert row["plan.expected_batch_size"] == 20  # a quarter


def test_the_midi_model_starts_from_public_text_which_is_reported(little_text, tmp_path, capsys):
    row = run(smoke(tmp_path, "e2e", "model=gpt2_midi", "train.steps=1", "eval.generate.limit=0"))
    assert row["plan.private"] is True and row["model.fresh"] is False
    vocabulary = "vocabulary from sgd_dialogues.txt.xz, webnlg2017-train.json"
    assert row["data.public_text"] == f"{vocabulary}; weights from webnlg2017-train.json"
    assert "Public in-domain text: vocabulary from sgd_dialogues" in capsys.readouterr().out


def test_in_context_learning_trains_nothing_and_is_not_private(little_text, tmp_path, capsys):
    row = run(smoke(tmp_path, "samsum", "clip=none", "eval.shots=2", "eval.prompt_set=1"))
    assert row["plan.private"] is False and row["plan.steps"] == 0 and "test/rouge1" in row
    assert "NOT PRIVATE" in capsys.readouterr().out
    assert (folder_of(tmp_path) / "outputs-test.jsonl").exists()


def test_lora_trains_over_frozen_bfloat16_weights(little_text, tmp_path):
    bfloat16 = ("train.precision=bfloat16", "model.frozen_dtype=bfloat16")
    row = run(smoke(tmp_path, "samsum", "clip=flat", *bfloat16, "train.steps=2", "eval.generate.limit=1"))
    weights = torch.load(folder_of(tmp_path) / "model.pt", weights_only=True)
    kinds = {("lora" in name, value.dtype) for name, value in weights.items()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)} and row["test/rouge1"] >= 0


REFUSED = [
    ("sst2", "data.name=files paths.data=nowhere data.hub=nowhere/at-all", "nowhere"),
    ("qnli", "data.name=files paths.data={data}", "train.tsv"),
    ("e2e", "data.name=files paths.data=nowhere", "e2e"),
    ("samsum", "data.name=files paths.data=nowhere", "samsum"),
    ("samsum", "model.lora.targets=[c_atn]", "c_atn"),
    ("sst2", "model.tokenizer=pretrained/gpt2_mini +model.shape.vocab_size=100", "embeds only 100"),
    ("sst2", "model=hub model.source=nobody/nothing-of-the-kind", "nobody/nothing-of-the-kind"),
    ("e2e", "model=roberta_tiny", "does not predict the next token"),
    ("cifar", "export=folder", "language models"),
    ("cifar", "clip=none eval.shots=1", "generate text"),
    ("sst2", "clip=none eval.shots=1", "generate text"),
]


@pytest.mark.parametrize(("task", "overrides", "words"), REFUSED)
def test_mistakes_are_one_sentence_and_nothing_is_written(little_text, tmp_path, monkeypatch, task, overrides, words):
    data = tmp_path / "data"
    (data / "glue" / "QNLI").mkdir(parents=True)
    (data / "glue" / "QNLI" / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    results = tmp_path / "results"
    with pytest.raises(UserError) as refused:
        run(smoke(results, task, *overrides.format(data=data).split()))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not results.exists()
