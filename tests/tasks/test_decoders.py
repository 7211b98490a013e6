"""Small Llama, Qwen and Gemma: clipped sums match single rows in float64; classifiers, adapters, and a complete run."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import attach, flat
from groupwise.config.compose import compose_run
from groupwise.tasks import make_task
from tests.clipping.traced import clip
from tests.combinations import CONF
from tests.rdp_alone import rdp_alone
from tests.tasks.clipped import MODES, check_sums, in_float64, losses_by_hand
from tests.tasks.decoders import CPU, EXAMPLE, FAMILIES, folder_of, settings
from trust.models.check import in_double

EXAMPLES = [0, 3, 7, 12]
FAST = {
    ("e2e", "llama", "all", "ghost"), ("e2e", "llama", "lora", "block"),
    ("e2e", "qwen3", "all", "layer"), ("e2e", "gemma", "lora", "ghost"), ("e2e", "gemma2", "all", "flat"),
    ("e2e", "gemma3_text", "lora", "layer"), ("sst2", "llama", "lora", "ghost"), ("sst2", "gemma", "all", "layer"),
}  # fmt: skip
"""One or two cases of each clipping mode, family and head; the others are slow."""


def loss_by_hand(task, example: int) -> torch.Tensor:
    """The loss of one row without padding, mask or positions, from all logits."""
    if hasattr(task, "_valid"):
        row, label = torch.as_tensor(task._train.tokens[example]).long(), int(task._train.labels[example])
        return F.cross_entropy(task.model(row[None], use_cache=False).logits[0], torch.tensor(label))
    samples = task._samples["train"]
    return losses_by_hand(task, samples.tokens[example], samples.starts[example]).mean()


def check(folder: Path, task: str, trains: str, mode: str, **model) -> None:
    built = in_float64(settings(folder, task, trains=trains, **model))
    with in_double():
        check_sums(built, EXAMPLES, mode, loss_by_hand)


@pytest.mark.parametrize(
    ("task", "family", "trains", "mode"),
    [
        pytest.param(*cell, marks=[] if cell in FAST else [pytest.mark.slow])
        for cell in itertools.product(("e2e", "sst2"), FAMILIES, ("all", "lora"), MODES)
    ],
)
def test_clipped_sums_match_single_rows(folders, task, family, trains, mode):
    check(folder_of(folders, family), task, trains, mode)


@pytest.mark.parametrize(
    "mode", [mode if mode == "ghost" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
@pytest.mark.parametrize("trains", ["all", pytest.param("lora", marks=pytest.mark.slow)])
def test_rematerialized_blocks_have_the_same_sums(folders, mode, trains):
    check(folder_of(folders, "llama"), "e2e", trains, mode, rematerialize=True)


def test_bfloat16_frozen_weights_give_sums_close_to_float32(folders):
    found = []
    for half in (False, True):
        config = settings(folder_of(folders, "llama"), trains="lora", frozen_dtype="bfloat16" if half else "float32")
        config.train.precision = "bfloat16" if half else "float32"
        task = make_task(config, CPU)
        frozen = {p.dtype for p in task.model.parameters() if p.dim() > 1 and not p.requires_grad}
        assert frozen == {torch.bfloat16 if half else torch.float32}
        with attach(task.model, flat(task.model), 1e3) as engine:
            clip(engine, task.losses_of, EXAMPLES)
        found.append(torch.cat([p.grad.flatten() for p in task.model.parameters() if p.requires_grad]))
        assert found[-1].dtype == torch.float32
    assert 0 < float((found[1] - found[0]).norm()) < 0.05 * float(found[0].norm())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_classifier_reads_the_last_token_before_padding(folders, family):
    task = make_task(settings(folder_of(folders, family), "sst2"), CPU)
    rows = [task._train.tokens[i] for i in EXAMPLES]
    assert len({len(row) for row in rows}) > 1
    begin = task.tokenizer.bos_token_id
    assert begin is None or all(row[0] == begin for row in rows)
    task.model.eval()
    with torch.no_grad():
        together = task.logits(task.model, task.inputs(rows, CPU))
        for row, logits in zip(rows, together, strict=True):
            states = task.model.model(torch.as_tensor(row).long()[None]).last_hidden_state
            torch.testing.assert_close(task.model.score(states[0, -1]), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "between"), [("qwen2", "\n"), ("llama", "<|begin_of_text|>")])
def test_texts_of_a_pair_are_separated(folders, family, between):
    task = make_task(settings(folder_of(folders, family), "qnli", data={"max_length": 300}), CPU)
    kept = [task.tokenizer.decode(task._train.tokens[i]).removeprefix("<|begin_of_text|>") for i in EXAMPLES]
    assert all(text.count(between) == 1 and all(side.strip() for side in text.split(between)) for text in kept)


def test_padding_token_of_the_model_is_used_if_the_tokeniser_has_none(folders, tmp_path):
    """Otherwise a classifier would read padding as text, and the loss would depend on the length of other examples."""
    EXAMPLE["write"](str(tmp_path), "llama", pad_token_id=5)
    task = make_task(settings(tmp_path, "sst2"), CPU)
    assert task.tokenizer.pad_token_id is None
    alone = torch.cat([task.losses_of([i]) for i in EXAMPLES])
    torch.testing.assert_close(task.losses_of(EXAMPLES), alone, rtol=1e-4, atol=1e-5)


def test_private_run_with_adapters_is_exported_and_reloaded(folders, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupwise.run import run

    source, out = folder_of(folders, "llama"), tmp_path / "out"
    words = ["task=e2e", "scale=smoke", "model=decoder", f"model.source={source}", "model.trains=lora"]
    words += [f"export={out}", f"paths.results={tmp_path / 'results'}", "model.lora.rank=2", "privacy.accountant=rdp"]
    config = compose_run(words, CONF)
    assert config.optim.learning_rate == 5e-4
    with rdp_alone():
        row = run(config)
    assert row["plan.private"] is True and 7.9 < row["plan.spent_epsilon"] <= 8
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["base"] == str(source) and "adapters" in provenance["note"]
    assert list(provenance["sha256"]) == ["adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer("name : The Eagle | food : French\n")["input_ids"]])
    before = base(ids).logits
    model = PeftModel.from_pretrained(base, out).eval()
    assert not torch.equal(model(ids).logits, before)
    [folder] = (tmp_path / "results" / "runs").iterdir()
    trained = torch.load(folder / "model.pt", weights_only=True)
    for name, value in model.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value, trained.get("model", trained)[name]), name
    written = [json.loads(line) for line in (folder / "outputs-test.jsonl").read_text().splitlines()]
    assert len(written) == 4 and all(isinstance(line["output"], str) for line in written)
    assert np.isfinite(row["test/bleu"])
