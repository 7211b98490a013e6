"""transformers models on rows of unequal length: the engine matches a loop over single, unpadded rows.

In a batch, rows are padded on the right, with an attention mask and explicit positions; a single row has no padding,
and the model computes its positions. The loss of an example is the mean over its predicted tokens.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import load_causal, load_classifier
from groupwise.models.trainable import choose_trainable
from groupwise.torchvision_import import import_torchvision
from tests.clipping.alone import assert_sums, looped, middle_thresholds
from tests.clipping.modes import FEW, MODES, attached
from tests.clipping.traced import clip, clip_batch

RTOL = 1e-9
LENGTHS = (9, 4, 7, 2, 6, 5)
IGNORED = -100
CLASSES = ("no", "maybe", "yes")
VOCABULARY, PADDING = 60, 1

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12}
BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 14,
}
DISTIL = {"n_layers": 2, "dim": 16, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 14}
OPT = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "max_position_embeddings": 12,
    "word_embed_proj_dim": 16,
}
LORA = LoraConfig(rank=3, alpha=6.0, targets=["c_attn", "c_proj", "c_fc"])

CAUSAL = {
    "gpt2_tied": ModelConfig(architecture="gpt2", shape=GPT2),
    "gpt2_untied": ModelConfig(architecture="gpt2", shape=GPT2, untie=True),
    "gpt2_lora": ModelConfig(architecture="gpt2", shape=GPT2, trains="lora", lora=LORA),
    "gpt2_eager": ModelConfig(architecture="gpt2", shape=GPT2, attention="eager"),
    "gpt2_bias": ModelConfig(architecture="gpt2", shape=GPT2, trains="bias"),
    "gpt_neox": ModelConfig(architecture="gpt_neox", shape=BERT),
}
CLASSIFIERS = {
    "roberta": ModelConfig(architecture="roberta", shape=BERT),
    "roberta_attention": ModelConfig(architecture="roberta", shape=BERT, trains="attention"),
    "roberta_bias": ModelConfig(architecture="roberta", shape=BERT, trains="bias"),
    "roberta_lora": ModelConfig(architecture="roberta", shape=BERT, trains="lora"),
    "bert": ModelConfig(architecture="bert", shape=BERT),
    "distilbert": ModelConfig(architecture="distilbert", shape=DISTIL),
    "gpt2_classifier": ModelConfig(architecture="gpt2", shape=GPT2),
}


class Tokenizer:
    """The attributes of a tokeniser that loading a model needs."""

    pad_token_id, bos_token_id, eos_token_id = PADDING, 0, 2

    def __len__(self) -> int:
        return VOCABULARY


@dataclass
class Case:
    """A model and six examples: rows of tokens with a class, or with a prompt that is not predicted."""

    model: nn.Module
    rows: list[Tensor]
    prompts: list[int]
    classes: Tensor | None
    first: int
    """The number of the first position."""

    def losses(self, examples: Sequence[int] = range(6), explicit: bool = True) -> Tensor:
        """The losses (n,) of one padded batch."""
        rows, prompts = [self.rows[i] for i in examples], [self.prompts[i] for i in examples]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if explicit:
            inputs["position_ids"] = torch.where(mask.bool(), torch.arange(ids.shape[1]) + self.first, PADDING)
        logits = self.model(**inputs).logits
        if self.classes is not None:
            return F.cross_entropy(logits, self.classes[list(examples)], reduction="none")
        labels = torch.full_like(ids, IGNORED)
        for label, row, prompt in zip(labels, rows, prompts, strict=True):
            label[prompt - 1 : len(row) - 1] = row[prompt:]
        losses = F.cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="none")
        return losses.sum(1) / (labels != IGNORED).sum(1)

    def loss_of(self, example: int) -> Tensor:
        """The loss of one example alone: no padding, no mask, no positions."""
        row, prompt = self.rows[example], self.prompts[example]
        logits = self.model(row[None]).logits[0]
        if self.classes is not None:
            return F.cross_entropy(logits, self.classes[example])
        return F.cross_entropy(logits[prompt - 1 : -1], row[prompt:])


def make_case(name: str, **changes: object) -> Case:
    settings = (CAUSAL | CLASSIFIERS)[name]
    settings = ModelConfig(**{**vars(settings), "fresh": True, "dropout": 0.0, "attention_dropout": 0.0, **changes})
    causal = name in CAUSAL
    model = load_causal(settings, Tokenizer()) if causal else load_classifier(settings, CLASSES, Tokenizer())
    model = choose_trainable(model, settings).double()
    with torch.no_grad():  # gradients of similar size in all layers, and LoRA's B not 0
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    rows = [torch.randint(5, VOCABULARY, (length,)) for length in LENGTHS]
    first = PADDING + 1 if settings.architecture == "roberta" else 0
    return Case(model, rows, [1, 2, 4, 1, 3, 1], None if causal else torch.tensor([0, 1, 2, 0, 1, 2]), first)


@cache
def loop_over(name: str) -> tuple[Case, Callable[[int], Tensor]]:
    """A case and the loop over its examples, cached for all modes."""
    torch.manual_seed(0)  # as in the fixture
    case = make_case("gpt2_tied", architecture="opt", shape=OPT) if name == "opt" else make_case(name)
    return case, looped(case.model, case.loss_of, range(6))


@cache
def truth_of(name: str, make_partition) -> tuple[list[float], Reference]:
    """Thresholds and the reference at them, cached for all modes that share them."""
    case, loss_of = loop_over(name)
    partition = make_partition(case.model)
    thresholds = middle_thresholds(case.model, loss_of, partition, range(6))
    return thresholds, clipped_sums(case.model, loss_of, range(6), partition, thresholds)


OTHER_FORMULA = ("materialized", "gram")
"""The formula that is a slow test for models of even and of odd index; the next model, with layers of the same kinds,
runs it in the fast tests."""


@pytest.mark.parametrize(
    ("name", "mode", "explicit"),
    [
        *(
            pytest.param(name, mode, True, marks=[pytest.mark.slow] if mode == OTHER_FORMULA[number % 2] else [])
            for number, name in enumerate([*CAUSAL, *CLASSIFIERS])
            for mode in (*FEW, "block", "gram", "materialized")
        ),
        *product(["gpt2_tied", "roberta", "bert", "distilbert"], FEW, [False]),
        *product(["opt"], FEW, [True]),
    ],
)
def test_clipped_sums_norms_and_counts_match_the_reference(double, name, mode, explicit):
    """Without `explicit`, the model computes one row of positions for all examples; RoBERTa, from each row's padding.

    OPT's feed-forward layers get inputs (B·T, d).
    """
    thresholds, truth = truth_of(name, MODES[mode][0])
    case, _ = loop_over(name)
    case.model.zero_grad()
    assert bool(((truth.norms > torch.tensor(thresholds)[:, None]).sum(1) == 3).any())  # some are clipped, some not
    with attached(case.model, mode, thresholds) as engine:
        clip(engine, partial(case.losses, explicit=explicit), range(6))
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=RTOL, atol=1e-12)
        assert torch.equal(engine.counts, truth.counts)
    assert_sums(case.model, truth.sums, atol=1e-15)


def test_rms_norms_of_transformers_have_a_rule():
    import_torchvision()  # before transformers
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    model = Qwen3RMSNorm(8)
    with warnings.catch_warnings(action="error"), attach(model, per_layer(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).sum((1, 2)), torch.randn(3, 4, 8))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_experts_are_exact_with_batched_mm_and_refused_otherwise(make_partition, experts):
    import_torchvision()  # before transformers
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_local_experts": 3}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads, experts_implementation=experts))
    model = model.float() if experts == "grouped_mm" else model.double()  # grouped_mm has no float64
    ids = torch.randint(20, (4, 6))

    def losses(examples) -> Tensor:
        scores = model(input_ids=ids[examples], use_cache=False).logits[:, :-1]
        return F.cross_entropy(scores.mT, ids[examples][:, 1:], reduction="none").mean(1)

    partition = make_partition(model)
    truth = clipped_sums(model, lambda i: losses([i])[0], range(4), partition, [0.1] * len(partition))
    model.zero_grad()
    with attach(model, partition, 0.1) as engine:
        if experts != "batched_mm":
            with pytest.raises(UserError, match="experts_implementation='batched_mm'"):
                clip(engine, losses, range(4))
            return
        clip(engine, losses, range(4))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-6, atol=1e-8)
