"""Beam search with tiny GPT-2 models over single characters; a `scripted` model writes a given text by position."""

import logging
import warnings
from functools import partial

import pytest
import torch

from groupwise.clipping import attach, per_layer
from groupwise.config.schema import GenerateConfig
from groupwise.tasks import beam_search
from groupwise.tasks.beam_search import generate
from groupwise.torchvision_import import import_torchvision
from tests.clipping.traced import rows_of, trace_batch

import_torchvision()
import transformers  # noqa: E402

CPU = torch.device("cpu")
BREAK_B, END = 96, 97
PROMPTS = ["Hi", "name[The Eagle], food[French]", "x", "area[riverside]", "name[The Eagle]"]


@pytest.fixture(autouse=True)
def no_warnings():
    """Fail on any warning of transformers or Python."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logging.Logger.warning_once.cache_clear()
    logger.addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def make_tokenizer():
    """One token for each character from ! to ~, the space and the line break, a line break with b, and the end."""
    characters = [*map(chr, range(33, 127)), "\u0120", "\u010a", "\u010ab"]  # as GPT-2 spells space and line break
    vocabulary = {character: number for number, character in enumerate(characters)}
    return transformers.GPT2TokenizerFast(vocab={**vocabulary, "<|endoftext|>": END}, merges=[])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def random_gpt2(positions=64, **changes):
    """A tied model in float64 with weights so large that every position and every token matters."""
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 16, "initializer_range": 0.5, "vocab_size": END + 1}
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_positions=positions, bos_token_id=END, eos_token_id=END, **{**settings, **changes}
    )
    return transformers.GPT2LMHeadModel(config).double()


def scripted(tokenizer, text, positions=32):
    """A model that writes `text[i]` at position i after any text; "#" is the end, "%" the token of line break and b."""
    model = random_gpt2(positions, n_layer=1, n_embd=positions, n_head=1, tie_word_embeddings=False)
    special = {"#": END, "%": BREAK_B}
    script = [special.get(character) or tokenizer(character).input_ids[0] for character in text]
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.lm_head.weight.zero_()
        for place, token in enumerate(script[1:]):  # the token at place + 1 is predicted at place
            model.lm_head.weight[token, place] = 10.0
    return model


def encode(tokenizer, texts=PROMPTS):
    return [tokenizer(text).input_ids for text in texts]


def write(model, tokenizer, prompts, **settings):
    settings = {"beams": 1, "max_new_tokens": 8, **settings}
    return generate(model, tokenizer, prompts, GenerateConfig(**settings), device=CPU)


def test_beams_match_transformers(tokenizer):
    model = random_gpt2(initializer_range=0.2, tie_word_embeddings=False).eval()
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 1
        model.lm_head.weight[END, 0] = 2.5  # so that some texts end early
    prompts = [[number] for number in range(12)]

    def directly(early_stopping):
        config = transformers.GenerationConfig(
            num_beams=4,
            max_new_tokens=8,
            length_penalty=3.0,
            early_stopping=early_stopping,
            pad_token_id=END,
            eos_token_id=END,
        )
        mask = torch.ones(len(prompts), 1, dtype=torch.long)
        out = model.generate(torch.tensor(prompts), attention_mask=mask, generation_config=config)[:, 1:]
        return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in out]

    texts = write(model, tokenizer, prompts, beams=4, length_penalty=3.0)
    assert texts == directly(True)
    assert texts != directly(False)
    assert texts != write(model, tokenizer, prompts, beams=4, length_penalty=2.0)
    assert texts != write(model, tokenizer, prompts, beams=1)


@pytest.mark.parametrize("settings", [{}, {"beams": 3}, {"max_new_tokens": 60}])
def test_text_does_not_depend_on_its_batch(tokenizer, settings):
    model, prompts = random_gpt2().eval(), encode(tokenizer)
    together = write(model, tokenizer, prompts, batch_size=16, **settings)
    assert together == [write(model, tokenizer, [prompt], **settings)[0] for prompt in prompts]
    assert together == write(model, tokenizer, prompts, batch_size=2, **settings)
    assert len(set(together)) > 3
    # Positions that count the padding, or attention to it, would give other texts:
    padded = [[END] * 3 + prompt for prompt in prompts]
    assert write(model, tokenizer, padded, **settings) != together


@pytest.mark.parametrize("beams", [1, 3])
def test_text_ends_at_the_end_token_and_is_stripped(tokenizer, beams):
    model = scripted(tokenizer, "??? ab cd #ef#")
    texts = write(model, tokenizer, encode(tokenizer, ["???", "?" * 10]), beams=beams)
    assert texts == ["ab cd", ""]


@pytest.mark.parametrize("beams", [1, 3])
def test_text_ends_at_a_line_break(tokenizer, beams):
    model = scripted(tokenizer, "?\n ab c \nd#")
    prompt = encode(tokenizer, ["?"])
    assert write(model, tokenizer, prompt, beams=beams, max_new_tokens=20) == ["ab c"]
    assert write(scripted(tokenizer, "?ac%d#"), tokenizer, prompt, beams=beams) == ["ac"]


def test_texts_end_at_the_last_position_of_the_model(tokenizer):
    model = scripted(tokenizer, "abcdefghijklmnop", positions=16)
    texts = write(model, tokenizer, encode(tokenizer, ["?" * 14, "?", "?" * 12, "?" * 15]), max_new_tokens=5)
    assert texts == ["op", "bcdef", "mnop", "p"]


def test_generation_leaves_model_and_random_state_unchanged(tokenizer):
    model, prompts = random_gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5), encode(tokenizer)
    texts = write(model.eval(), tokenizer, prompts, beams=2)
    own = model.generation_config
    own.update(do_sample=True, temperature=9.0, repetition_penalty=9.0, min_new_tokens=5, num_return_sequences=2)
    state = torch.get_rng_state()
    model.train()
    assert write(model, tokenizer, prompts, beams=2) == texts
    assert model.training and model.transformer.h[0].attn.training
    assert model.generation_config is own and own.do_sample
    assert torch.equal(torch.get_rng_state(), state)
    write(model.eval(), tokenizer, prompts)
    assert not model.training


def losses_of(model, rows):
    logits = model(input_ids=rows, position_ids=torch.arange(rows.shape[1]).repeat(len(rows), 1)).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("lora", [False, True])
def test_generation_does_not_affect_an_attached_engine(tokenizer, lora):
    model, prompts = random_gpt2().eval(), encode(tokenizer)
    plain = write(model, tokenizer, prompts, beams=3)
    if lora:
        import peft

        adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        with warnings.catch_warnings(action="ignore"):
            model = peft.get_peft_model(model, adapters).double().eval()
        assert write(model, tokenizer, prompts, beams=3) != plain  # the adapters have an effect
    rows = torch.randint(END, (3, 7))
    alone = write(model, tokenizer, prompts, beams=3)
    found = []
    for writes in (False, True):
        with attach(model, per_layer(model), 1.0) as engine:
            row_losses = partial(losses_of, model)
            trace_batch(engine, row_losses, rows)
            model.zero_grad()
            if writes:
                assert write(model, tokenizer, prompts, beams=3) == alone
                assert engine.examples == 0
            losses = engine.losses(rows_of(row_losses, rows), range(3))
            if writes:
                assert write(model, tokenizer, prompts, beams=3) == alone
            engine.backward(losses)
            found.append((engine.counts, [p.grad.clone() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_out_of_memory_halves_the_batch_of_prompts(tokenizer, monkeypatch, capsys):
    prompts = encode(tokenizer)
    expected = write(random_gpt2(), tokenizer, prompts)
    search = beam_search._search

    def small(generator, tokenizer, prompts, *rest):
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return search(generator, tokenizer, prompts, *rest)

    monkeypatch.setattr(beam_search, "_search", small)
    assert write(random_gpt2(), tokenizer, prompts, batch_size=4) == expected
    assert "evaluating with 2 examples at once" in capsys.readouterr().err
    with pytest.raises(torch.OutOfMemoryError):
        monkeypatch.setattr(beam_search, "_search", lambda *_: small(0, 0, [0] * 3))
        write(random_gpt2(), tokenizer, prompts, batch_size=4)
