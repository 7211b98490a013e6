"""Tiny models over single characters generate the same text on three stages as on one process."""

import warnings
from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist

from groupwise.config.schema import GenerateConfig
from groupwise.pipeline.evaluation import Searcher, StageLink
from groupwise.pipeline.split import cut
from groupwise.tasks.beam_search import generate
from groupwise.torchvision_import import import_torchvision
from tests.pipeline.ranks import run_ranks
from tests.tasks.test_beam_search import CPU, END, make_tokenizer

import_torchvision()
import transformers  # noqa: E402

POSITIONS = 40
PROMPTS = ["Hi", "name[The Eagle], food[French]", "x", "area[riverside]", "name[The Eagle]", "n" * (POSITIONS - 3)]
SETTINGS = [
    {"beams": 1},
    {"beams": 4, "length_penalty": 2.0, "batch_size": 3},
    {"beams": 4, "batch_size": 4},
    {"beams": 3, "max_new_tokens": POSITIONS - 10},
]
FAMILIES = ["gpt2", "lora", "opt", "llama"]
CASES = [(family, number) for family in FAMILIES for number in range(len(SETTINGS)) if family == "gpt2" or number < 2]


def make_model(family):
    """Four blocks in float32, with weights so large that every token matters, the same in every process."""
    torch.manual_seed(7)
    common = {"vocab_size": END + 1, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    if family in ("gpt2", "lora"):
        sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "n_positions": POSITIONS}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **common, initializer_range=0.3))
    else:
        sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16, "init_std": 0.3}
        sizes |= {"max_position_embeddings": POSITIONS, "initializer_range": 0.3}
        if family == "opt":
            config = transformers.OPTConfig(**sizes, **common, ffn_dim=32, word_embed_proj_dim=12)
            model = transformers.OPTForCausalLM(config)
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common, intermediate_size=32))
    if family == "lora":
        import peft

        adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        with warnings.catch_warnings(action="ignore"):
            model = peft.get_peft_model(model, adapters)
    model.get_output_embeddings().weight.requires_grad_(False)  # a tied head is on two stages
    return model.train()


RANGES = ((0, 1), (1, 2), (2, 4))


def settings_of(changes):
    return GenerateConfig(**{"max_new_tokens": 8, **changes})


def on_stages(rank, world):
    """Texts by family and settings, the state of the process afterwards, and an error."""
    tokenizer = make_tokenizer()
    prompts = tokenizer(PROMPTS).input_ids
    found, logged = {}, BufferingHandler(100)
    transformers.utils.logging.add_handler(logged)
    for family in FAMILIES:
        stage = cut(make_model(family), RANGES, rank)
        random = torch.get_rng_state()
        for case in CASES:
            if case[0] == family:
                settings = settings_of(SETTINGS[case[1]])
                found[case] = generate(Searcher(StageLink(stage, CPU)), tokenizer, prompts, settings, device=CPU)
        found[family, "left"] = (
            all(module.training for module in stage.modules()),
            torch.equal(torch.get_rng_state(), random),
            torch.is_grad_enabled(),
        )
    pair = dist.new_group([1, 2])
    if rank:
        stage = cut(make_model("gpt2"), ((0, 3), (3, 4)), rank - 1, rematerialize=True)
        found["pair"] = generate(
            Searcher(StageLink(stage, CPU, pair)), tokenizer, prompts, settings_of(SETTINGS[1]), device=CPU
        )
    transformers.utils.logging.remove_handler(logged)
    return found | {"logged": [record.getMessage() for record in logged.buffer]}


@pytest.fixture(scope="module")
def found():
    return run_ranks(on_stages, 3)


@pytest.fixture(scope="module")
def expected():
    tokenizer = make_tokenizer()
    prompts = tokenizer(PROMPTS).input_ids
    return {
        (family, number): generate(make_model(family), tokenizer, prompts, settings_of(SETTINGS[number]), device=CPU)
        for family, number in CASES
    }


@pytest.mark.parametrize(("family", "number"), CASES)
def test_stages_write_what_the_whole_model_writes(found, expected, family, number):
    assert [rank[family, number] for rank in found] == [expected[family, number]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_leaves_modes_and_generators_unchanged(found, family):
    assert [rank[family, "left"] for rank in found] == [(True, True, True)] * 3


def test_some_of_the_processes_may_be_a_pipeline(found, expected):
    assert [rank.get("pair") for rank in found] == [None, expected["gpt2", 1], expected["gpt2", 1]]


def test_transformers_logs_no_warning(found):
    assert [rank["logged"] for rank in found] == [[]] * 3
