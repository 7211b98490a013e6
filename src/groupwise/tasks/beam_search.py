"""Searches by beam over many prompts, by transformers' `generate`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from groupwise.config.schema import GenerateConfig
from groupwise.errors import UserError
from groupwise.models.language import position_limit
from groupwise.training.memory import halve_on_oom
from groupwise.training.task import eval_mode

FEW_BATCHES = 3
"""No progress bar for so few."""


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    settings: GenerateConfig,
    ends: Sequence[int] = (),
    *,
    device: torch.device,
    single_line: bool = True,
    progress: bool = True,
) -> list[str]:
    """What the model writes after each prompt: the best beam up to an end token, stripped.

    A text depends on its own prompt alone, not on those it shares a batch with: prompts of like length are padded on
    the left under a mask, and those so long that fewer than `max_new_tokens` fit after them are not mixed with others.
    The model is in eval mode meanwhile and then as before; nothing random is drawn, whatever the model's own generation
    settings say; an attached clipping engine sees nothing.

    Args:
        model: a causal language model of transformers, bare or with peft's adapters, or what stands for one.
        tokenizer: its tokeniser; the end token also pads where there is no pad token.
        prompts: token ids, at least one each.
        settings: beams, max_new_tokens, length_penalty, no_repeat_ngram (which also counts the prompt's own), and
            batch_size, in prompts, which is halved where memory runs out; `limit` is the caller's.
        ends: tokens that end a text; by default the tokeniser's end token alone.
        device: where the model is.
        single_line: a text ends at its first line break; beams end there, too, so that what would come after it does
            not weigh in their choice.
        progress: show a bar on stderr, where that is a terminal.

    Raises:
        UserError: a prompt that is empty, or that leaves no room for a token; a tokeniser without an end token; a model
            that is no causal language model.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("The tokeniser has no end token, so generation would not know where to stop: set eos_token.")
    generator = _generator(model)
    positions = position_limit(generator)
    for prompt in prompts:
        if not 1 <= len(prompt) < positions:
            raise UserError(
                f"A prompt has {len(prompt)} tokens, and the model has {positions} positions: give it at least one "
                f"token and at most {positions - 1}."
            )
    lengths = [len(prompt) for prompt in prompts]
    breaks = _line_breaks(generator, tokenizer).to(device) if single_line else None

    def write(size: int) -> list[str]:
        texts = [""] * len(prompts)
        batches = _batches(lengths, positions, settings, size)
        shown = progress and len(batches) > FEW_BATCHES
        for batch in tqdm(batches, "generate", unit="batch", disable=None if shown else True, file=sys.stderr):
            some = [prompts[i] for i in batch]
            new = _search(generator, tokenizer, some, positions, settings, list(ends), breaks, device)
            for index, tokens in zip(batch, new.tolist(), strict=True):
                texts[index] = _text(tokenizer, tokens, single_line)
        return texts

    with _quiet(model, generator), torch.no_grad():
        return halve_on_oom(settings.batch_size, write)


def _batches(lengths: list[int], positions: int, settings: GenerateConfig, size: int) -> list[list[int]]:
    """Indices of prompts in batches of at most `size`, the longest first."""

    def alike(index: int) -> tuple[int, int]:
        """What the prompts of a batch have in common: the room after them and, as padding would count among the
        sequences that may not be repeated, their length."""
        room = min(settings.max_new_tokens, positions - lengths[index])
        return room, lengths[index] if settings.no_repeat_ngram else 0

    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    batches = []
    for _, group in groupby(order, alike):
        same = list(group)
        batches += [same[start : start + size] for start in range(0, len(same), size)]
    return batches


def _search(
    generator: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    positions: int,
    settings: GenerateConfig,
    ends: list[int],
    breaks: Tensor | None,
    device: torch.device,
) -> Tensor:
    """New tokens of each prompt's best beam, (n, at most max_new_tokens), padded on the right."""
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    searching = {"length_penalty": settings.length_penalty, "early_stopping": True} if settings.beams > 1 else {}
    config = GenerationConfig(
        max_new_tokens=min(settings.max_new_tokens, positions - width),
        num_beams=settings.beams,
        do_sample=False,
        no_repeat_ngram_size=settings.no_repeat_ngram,
        eos_token_id=ends or end,
        pad_token_id=pad,
        **searching,
    )
    stop = None if breaks is None else [_line_end(breaks, width)]
    out = generator.generate(tokens, attention_mask=mask, generation_config=config, stopping_criteria=stop)
    return out[:, width:]


def _generator(model: nn.Module) -> Any:
    """The transformers model itself, also inside peft's wrappers: adapters live in its layers."""
    from transformers import GenerationMixin

    found = next((module for module in model.modules() if isinstance(module, GenerationMixin)), None)
    if found is None:
        raise UserError(f"{type(model).__name__} cannot generate text: give a causal language model of transformers.")
    return found


@contextmanager
def _quiet(model: nn.Module, generator: Any) -> Iterator[None]:
    """Eval mode, and no generation settings of the model's own: they would fill in what ours leave open."""
    from transformers import GenerationConfig

    own, generator.generation_config = generator.generation_config, GenerationConfig()
    try:
        with eval_mode(model):
            yield
    finally:
        generator.generation_config = own


def _line_breaks(generator: Any, tokenizer: Any) -> Tensor:
    """Which tokens have a line break in them, (V,) bool, V the model's vocabulary."""
    size = generator.config.get_text_config().vocab_size
    return torch.tensor(["\n" in text for text in tokenizer.batch_decode([[token] for token in range(size)])])


def _line_end(breaks: Tensor, width: int) -> Any:
    """Ends a row (prompt of `width` tokens, then new ones) with a line break that is not its very beginning."""

    def ended(rows: Tensor, scores: Any, **_: Any) -> Tensor:
        new = breaks[rows[:, width:]]
        return new[:, -1] & ~new.all(1)

    return ended


def _text(tokenizer: Any, tokens: list[int], single_line: bool) -> str:
    """The text of new tokens; after the end token there is only padding, and neither is text."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
    return text.split("\n")[0].rstrip() if single_line else text
