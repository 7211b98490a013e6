"""`PrivateTrainer` computes per-example losses for each kind of task in transformers, equal to the model's loss."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

from groupwise.errors import UserError
from groupwise.integrations.losses import cross_entropies, find_losses, span_losses
from groupwise.integrations.transformers import PrivacyArguments, PrivateTrainer

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 20,
}
M2M = {**BART, "vocab_size": 30, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def roberta(auto: Any = AutoModelForSequenceClassification, **options: Any) -> nn.Module:
    return auto.from_config(AutoConfig.for_model("roberta", vocab_size=30, **SIZES, **options))


def rows(labels: Callable[[torch.Generator], dict[str, Any]], count: int = 40) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(4, 30, (8,), generator=generator), **labels(generator)} for _ in range(count)]


def tokens(g: torch.Generator) -> dict[str, Tensor]:
    return {"labels": torch.cat([torch.randint(4, 30, (4,), generator=g), torch.tensor([1, -100])])}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], dict[str, Any]]]] = {
    "regression": (lambda: roberta(num_labels=1), lambda g: {"labels": torch.randn((), generator=g)}),
    "two numbers": (
        lambda: roberta(num_labels=2, problem_type="regression"),
        lambda g: {"labels": torch.randn(2, generator=g)},
    ),
    "several labels": (
        lambda: roberta(num_labels=3, problem_type="multi_label_classification"),
        lambda g: {"labels": torch.randint(2, (3,), generator=g).float()},
    ),
    "question answering": (
        lambda: roberta(AutoModelForQuestionAnswering),
        lambda g: {name: torch.randint(8, (), generator=g) for name in ("start_positions", "end_positions")},
    ),
    "t5": (lambda: AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", vocab_size=30, **T5)), tokens),
    "bart": (lambda: AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", vocab_size=30, **BART)), tokens),
    "m2m_100": (lambda: AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("m2m_100", **M2M)), tokens),
}


def batch_of(some: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in some]) for name in some[0]}


def private(folder: Path, model: nn.Module, data: Any, **options: Any) -> PrivateTrainer:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=10, max_steps=2, report_to=[], save_strategy="no", **options
    )
    return PrivateTrainer(model, args, privacy={"epsilon": 8}, train_dataset=data)


@pytest.mark.parametrize("kind", KINDS)
def test_per_example_losses_match_the_models_loss_and_train(tmp_path, kind):
    torch.manual_seed(0)
    make, labels = KINDS[kind]
    model, data = make(), rows(labels)
    losses_of = find_losses(model, batch_of, data[:3], 1e-5)
    model.eval()
    ours = losses_of(model, batch_of(data[:6]))
    assert ours.shape == (6,)
    for row, loss in zip(data[:6], ours, strict=True):
        assert torch.isclose(model(**batch_of([row])).loss, loss, rtol=1e-4)
    trainer = private(tmp_path, model, data)
    assert 7.9 < trainer.train().metrics["epsilon"] <= 8


@pytest.mark.parametrize("make", [lambda: roberta(num_labels=5), KINDS["t5"][0]], ids=["classes", "tokens"])
def test_label_smoothing_matches_transformers(tmp_path, make):
    model = make().eval()
    labels = tokens if hasattr(model, "lm_head") else lambda g: {"labels": torch.randint(5, (), generator=g)}
    data = rows(labels)
    one = batch_of(data[:1])
    losses_of = find_losses(model, batch_of, data[:1], 1e-5, smoothing=0.2)
    assert torch.isclose(LabelSmoother(0.2)(model(**one), one["labels"]), losses_of(model, one)[0], rtol=1e-5)
    private(tmp_path, model, data, label_smoothing_factor=0.2).train()


def test_label_smoothing_is_refused_for_other_labels_than_classes_and_tokens():
    make, labels = KINDS["regression"]
    with pytest.raises(UserError, match="needs labels that are classes or tokens"):
        find_losses(make(), batch_of, rows(labels, 1), 1e-5, smoothing=0.1)


@pytest.mark.parametrize("how", [{"weight": torch.tensor([1.0, 5.0])}, {"label_smoothing": 0.1}], ids=str)
def test_a_model_with_another_loss_is_refused(tmp_path, monkeypatch, how):
    """Class weights have no effect on the loss of one example, and smoothing has little."""
    model, data = roberta(), rows(lambda g: {"labels": torch.tensor(0)})
    data[5]["labels"], data[6]["labels"] = torch.tensor(1), torch.tensor(-100)
    assert find_losses(model, batch_of, data[4:8], 1e-5) is cross_entropies
    with pytest.raises(UserError, match="if all labels are -100"):
        find_losses(model, batch_of, data[6:7], 1e-5)
    monkeypatch.setattr(
        "transformers.models.roberta.modeling_roberta.CrossEntropyLoss", partial(nn.CrossEntropyLoss, **how)
    )
    with pytest.raises(UserError, match="model's own loss is neither"):
        private(tmp_path, model, data, bf16=True, use_cpu=True).train()


@pytest.mark.parametrize("left", [0, 4])
def test_a_spans_loss_does_not_depend_on_padding(left):
    """The loss of transformers does, because its softmax includes the logits of the padding."""
    model = roberta(AutoModelForQuestionAnswering).eval()
    short = batch_of(rows(KINDS["question answering"][1], 1)) | {"attention_mask": torch.ones(1, 8, dtype=torch.long)}
    longer = {name: positions + left for name, positions in short.items()}
    for name, filler in (("input_ids", 1), ("attention_mask", 0)):
        longer[name] = F.pad(short[name], (left, 4 - left), value=filler)
    assert torch.isclose(span_losses(model, short), span_losses(model, longer), rtol=1e-5)
    assert not torch.isclose(model(**short).loss, model(**longer).loss, rtol=1e-5)
    assert find_losses(model, lambda _: longer, [0], 1e-5) is span_losses


def test_an_answer_beyond_the_text_has_no_loss():
    model = roberta(AutoModelForQuestionAnswering).eval()
    inputs = batch_of(rows(KINDS["question answering"][1], 2))
    inputs["start_positions"] = inputs["end_positions"] = torch.tensor([3, 8])
    first, beyond = span_losses(model, inputs)
    assert first > 0 and beyond == 0


def test_privacy_arguments_may_be_a_dict(tmp_path):
    assert PrivacyArguments.of({"epsilon": 3, "clip": "flat"}) == PrivacyArguments(epsilon=3, clip="flat")
    given = PrivacyArguments(epsilon=3)
    assert PrivacyArguments.of(given) is given
    for wrong, message in (
        ({"target_epsilon": 3}, r"privacy has no argument 'target_epsilon' \(did you mean epsilon\?\)"),
        ({"max_grad_norm": 3}, r"'max_grad_norm' \(did you mean threshold\?\)"),
    ):
        with pytest.raises(UserError, match=message):
            PrivacyArguments.of(wrong)
