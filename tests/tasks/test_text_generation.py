"""Text generation: sequences, losses, exact clipped sums with padding, perplexity, generated texts, and truncation."""

import copy
import json
import math

import pytest
import torch

from groupwise.config.schema import (
    DataConfig,
    EvalConfig,
    GenerateConfig,
    LoraConfig,
    ModelConfig,
    PathsConfig,
    RunConfig,
    TrainConfig,
)
from groupwise.data.text import instruct
from groupwise.errors import UserError
from groupwise.metrics import corpus_bleu, e2e_rouge_l
from groupwise.models.hub import load_tokenizer
from groupwise.tasks import make_task
from groupwise.tasks.samples import PairEncoder
from groupwise.tasks.text_generation import DELIMITER
from groupwise.training.step import Trainer
from tests.tasks import test_text_classification
from tests.tasks.clipped import MODES, check_sums, in_float64, losses_by_hand

CPU = torch.device("cpu")
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 160}
LORA = {"trains": "lora", "lora": LoraConfig(rank=2, targets=["c_attn", "c_proj"])}
EXAMPLES = [0, 3, 7, 12]


def config(task="e2e", model=(), data=(), generate=(), **changes) -> RunConfig:
    named = {"name": "gpt2_tiny", "source": "pretrained/gpt2_mini", "architecture": "gpt2", "shape": GPT2}
    settings = {"name": "synthetic", "train_limit": 40, "max_length": 128}
    searching = {"beams": 2, "max_new_tokens": 6, "batch_size": 4, "limit": 3}
    return RunConfig(
        task=task,
        model=ModelConfig(**test_text_classification.FRESH | named | dict(model)),
        data=DataConfig(**settings | dict(data)),
        eval=EvalConfig(generate=GenerateConfig(**searching | dict(generate))),
        **changes,
    )


@pytest.fixture(scope="module")
def tied():
    return in_float64(config())


@pytest.fixture(scope="module")
def tasks(tied):
    return {
        "tied": tied,
        "tied, sum": in_float64(config(train=TrainConfig(token_loss="sum"))),
        "untied": in_float64(config("dart", {"untie": True})),
        "lora": in_float64(config("samsum", LORA)),
    }


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pretrained/gpt2_mini")


# -- sequences ------------------------------------------------------------------------------------------------------


def test_table_and_text_are_separated_by_the_bos_token(tokenizer):
    samples = PairEncoder(tokenizer, "", 100).pairs([("name : A | area : B", "A is in B. ")])
    assert tokenizer.decode(samples.tokens[0]) == "name : A | area : B<|endoftext|> A is in B.<|endoftext|>"
    start = int(samples.starts[0])
    assert samples.tokens[0][start - 1] == tokenizer.bos_token_id
    assert tokenizer.decode(samples.tokens[0][start:]) == " A is in B.<|endoftext|>"
    assert samples.cut == 0 and samples.target_lengths.tolist() == [len(samples.tokens[0]) - start]


def test_dialogue_and_summary_are_separated_by_the_delimiter(tokenizer):
    source = instruct("A: Hi!\nB: Bye.")
    assert source.endswith(DELIMITER)
    samples = PairEncoder(tokenizer, DELIMITER, 100).pairs([(source, "They meet.")])
    assert tokenizer.decode(samples.tokens[0]) == f"{source} They meet.<|endoftext|>"
    assert tokenizer.decode(samples.tokens[0][: samples.starts[0]]) == source
    assert samples.tokens[0][: samples.starts[0]].tolist() == tokenizer(source)["input_ids"], "as encoded in one piece"


def test_tokeniser_without_an_end_of_text_token_is_refused(tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        PairEncoder(endless, "", 100)


@pytest.mark.parametrize("ending", ["", DELIMITER])
def test_sources_are_cut_before_targets_and_the_delimiter_is_kept(tokenizer, ending):
    pair = ("one two three four five six seven eight" + ending, "a b c")
    uncut = PairEncoder(tokenizer, ending, 100).pairs([pair])
    encoder = PairEncoder(tokenizer, ending, len(uncut.tokens[0]) - 3)
    between = encoder.ending
    cut = encoder.pairs([pair, ("one" + ending, "a b c")])
    assert cut.cut == 1
    start = int(uncut.starts[0])
    body = uncut.tokens[0][: start - len(between) - 3].tolist()
    assert cut.tokens[0].tolist() == [*body, *between, *uncut.tokens[0][start:]]
    assert encoder.prompts([pair[0]], len(body) + len(between)) == [[*body, *between]]
    short = PairEncoder(tokenizer, ending, len(between) + 2).pairs([pair])
    assert short.tokens[0].tolist() == [*between, *uncut.tokens[0][start : start + 2]], "the target is cut last"
    assert short.starts[0] == len(between) and short.cut == 1


# -- losses and clipped sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "tied, sum", "untied", "lora"])
def test_losses_cover_only_target_tokens(tasks, name):
    task = tasks[name]
    samples = task._samples["train"]
    expected = [losses_by_hand(task, samples.tokens[i], samples.starts[i]) for i in EXAMPLES]
    expected = torch.stack([part.sum() if "sum" in name else part.mean() for part in expected])
    torch.testing.assert_close(task.losses_of(EXAMPLES), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tied", "tied, sum", "untied", "lora"])
def test_clipped_sums_match_single_examples(tasks, name, mode):
    check_sums(tasks[name], EXAMPLES, mode)


def test_model_without_logits_to_keep_computes_all_logits(tied, monkeypatch):
    kept = tied.losses_of(EXAMPLES)
    monkeypatch.setattr(tied.inputs, "accepts", tied.inputs.accepts - {"logits_to_keep"})
    asked = []
    logits = tied.logits
    monkeypatch.setattr(tied, "logits", lambda model, inputs: (asked.append(inputs.keys()), logits(model, inputs))[1])
    torch.testing.assert_close(tied.losses_of(EXAMPLES), kept)
    assert asked and "logits_to_keep" not in asked[0]


# -- evaluation and generation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "tied, sum"])
def test_perplexity_is_over_tokens_and_loss_over_examples(tasks, name):
    task = tasks[name]
    samples = task._samples["valid"]
    with torch.no_grad():
        parts = [losses_by_hand(task, samples.tokens[i], samples.starts[i]) for i in range(10)]
    nll = float(torch.cat(parts).mean())
    loss = float(torch.stack([part.sum() if "sum" in name else part.mean() for part in parts]).mean())
    found = Trainer(task, None, None).evaluate("valid", batch_size=4, limit=10)
    assert found == pytest.approx({"loss": loss, "nll": nll, "perplexity": math.exp(nll)}, rel=1e-9)
    assert task.model.training and task.headline in found


def test_every_test_reference_counts_once(tied):
    assert len(tied._samples["test"]) == sum(len(request.references) for request in tied._data.test)
    found = tied.describe_data()
    assert (found["test_inputs"], found["test_examples"]) == (20, 80) and found["train_examples"] == 40
    assert found["cut_examples"] == found["cut_examples_test"] == 0 and "made up" in found["generated"]


def test_final_evaluation_generates_and_scores_texts():
    task = make_task(config(), CPU)
    assert task.outputs() == {}
    assert set(Trainer(task, None, None).evaluate("valid", 50, limit=20, final=True)) == {"loss", "nll", "perplexity"}
    assert set(Trainer(task, None, None).evaluate("test", 50, limit=20)) == {"loss", "nll", "perplexity"}
    found = Trainer(task, None, None).evaluate("test", 50, limit=20, final=True)
    rows = task.outputs()["test"]
    assert [row["source"] for row in rows] == [request.source for request in task._data.test[:3]]
    texts, references = [row["output"] for row in rows], [row["references"] for row in rows]
    assert found["bleu"] == corpus_bleu(texts, references) and found["rougeL"] == e2e_rouge_l(texts, references)
    json.dumps(rows)


@pytest.mark.parametrize("shots", [0, 2])
def test_in_context_evaluation_uses_demonstrations(shots, monkeypatch):
    shape = {**GPT2, "n_positions": 700}
    task = make_task(config("samsum", {"shape": shape}), CPU)
    seen = []
    from groupwise.tasks import text_generation

    def fake(model, tokenizer, prompts, settings, *, device):
        seen.extend(tokenizer.decode(prompt) for prompt in prompts)
        return ["They meet."] * len(prompts)

    monkeypatch.setattr(text_generation, "generate", fake)
    found = task.evaluate_in_context(shots, 1)
    assert set(found) == {"rouge1", "rouge2", "rougeL"} and len(task.outputs()["test"]) == 3
    assert len(seen) == 3
    for text, request in zip(seen, task._data.test, strict=False):
        assert text.endswith(request.source) and text.count("TL;DR") == shots + 1
    assert all(text.split(" ")[0] == "Summarize" for text in seen)


def test_in_context_prompt_cuts_the_input_and_keeps_the_delimiter():
    task = make_task(config("samsum", {"shape": {**GPT2, "n_positions": 150}}), CPU)
    (prompt,) = task._encoder.in_context([instruct("A: " + "word " * 300)], 100)
    assert len(prompt) == 100 and task.tokenizer.decode(prompt).endswith(DELIMITER)
    with pytest.raises(UserError, match=r"eval\.shots=4"):
        task.evaluate_in_context(4, 0)


# -- export and bad input -------------------------------------------------------------------------------------------


def test_export_stores_tied_weights_once(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    task = make_task(config(), CPU)
    task.model.eval()
    inputs = task.inputs([task._samples["train"].tokens[0]], CPU)
    task.export(tmp_path, {"seed": 0})
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(w.shape == task.model.lm_head.weight.shape for w in weights.values()) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(model(**inputs).logits, task.logits(task.model, inputs), rtol=0, atol=0)
    assert json.loads((tmp_path / "provenance.json").read_text())["seed"] == 0
    with pytest.raises(UserError, match="cannot be written"):
        (tmp_path / "file").write_text("")
        task.export(tmp_path / "file" / "out", {})


BAD = (
    ({"model": {"name": "wide_resnet"}}, "wide_resnet cannot read text"),
    ({"model": {"source": None}}, "no tokeniser"),
    ({"data": {"name": "digits"}}, r"data\.name=digits is not known for text"),
    ({"data": {"max_length": 161}}, r"max_length=161 is more than the \d+ positions of the model"),
    ({"data": {"max_length": 2}}, r"max_length=2 leaves no room for text: give at least 3"),
    ({"data": {"name": "files", "hub": "nowhere/glue"}, "paths": PathsConfig(data="nowhere")}, "nowhere"),
)
LONG = {"generate": {"max_new_tokens": 159}}, r"max_new_tokens=159 leaves no room for a source in the model's 160"


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [*((make, *bad) for make in (config, test_text_classification.config) for bad in BAD), (config, *LONG)],
)
def test_bad_input_gives_one_sentence(make, changes, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as error:
        make_task(make(**changes), CPU)
    assert "\n" not in str(error.value)
