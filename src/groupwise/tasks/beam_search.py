"""Beam search over many prompts, with transformers' `generate`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import GenerateConfig
from groupwise.models.language import position_limit
from groupwise.training.memory import halve_on_oom
from groupwise.training.task import eval_mode


def generate(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], settings: GenerateConfig, *, device: torch.device
) -> list[str]:
    """Generate a text for each prompt: the best beam up to an end token or a line break, stripped.

    A text depends on its own prompt alone, not on the other prompts of its batch. Prompts of similar length are padded
    on the left, with a mask. The prompts of a batch have room for equally many new tokens. The model runs in eval mode;
    afterwards its mode is restored. The search draws no random numbers, whatever the model's own generation settings
    are, and an attached clipping engine does nothing. A line break ends beams too, so that later tokens do not affect
    the choice.

    Args:
        model: a causal language model of transformers, with or without peft's adapters.
        tokenizer: the model's; if it has no padding token, the end token is used.
        prompts: token ids, at least one each, and fewer than the model has positions.
        settings: beams, max_new_tokens, length_penalty, and batch_size in prompts, which is halved if memory runs out;
            `limit` is not used.
    """
    from transformers import GenerationMixin

    # The transformers model inside peft's wrappers; the adapters are in its layers.
    generator: Any = next(module for module in model.modules() if isinstance(module, GenerationMixin))
    positions = position_limit(generator)
    lengths = [len(prompt) for prompt in prompts]
    breaks = _line_breaks(generator, tokenizer).to(device)

    def write(size: int) -> list[str]:
        texts = [""] * len(prompts)
        for batch in _batches(lengths, positions, settings, size):
            some = [prompts[i] for i in batch]
            new = _search(generator, tokenizer, some, positions, settings, breaks)
            for index, tokens in zip(batch, new.tolist(), strict=True):
                texts[index] = _text(tokenizer, tokens)
        return texts

    with _quiet(model, generator), torch.no_grad():
        return halve_on_oom(settings.batch_size, write)


def _batches(lengths: list[int], positions: int, settings: GenerateConfig, size: int) -> list[list[int]]:
    """Batches of at most `size` indices, the longest prompts first; a batch has one room for new tokens."""

    def room(index: int) -> int:
        return min(settings.max_new_tokens, positions - lengths[index])

    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    batches = []
    for _, group in groupby(order, room):
        same = list(group)
        batches += [same[start : start + size] for start in range(0, len(same), size)]
    return batches


def _search(
    generator: Any, tokenizer: Any, prompts: list[list[int]], positions: int, settings: GenerateConfig, breaks: Tensor
) -> Tensor:
    """New tokens of each prompt's best beam, (n, at most max_new_tokens), padded on the right."""
    from transformers import GenerationConfig

    width, device = max(map(len, prompts)), breaks.device
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    searching = {"length_penalty": settings.length_penalty, "early_stopping": True} if settings.beams > 1 else {}
    config = GenerationConfig(
        max_new_tokens=min(settings.max_new_tokens, positions - width),
        num_beams=settings.beams,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=pad,
        **searching,
    )
    options = {"generation_config": config, "stopping_criteria": [_line_end(breaks, width)]}
    return generator.generate(tokens, attention_mask=mask, **options)[:, width:]


@contextmanager
def _quiet(model: nn.Module, generator: Any) -> Iterator[None]:
    """Eval mode, without the model's own generation settings, which would override ours."""
    from transformers import GenerationConfig

    own, generator.generation_config = generator.generation_config, GenerationConfig()
    try:
        with eval_mode(model):
            yield
    finally:
        generator.generation_config = own


def _line_breaks(generator: Any, tokenizer: Any) -> Tensor:
    """A mask of the tokens that contain a line break, (V,) bool, for a vocabulary of V."""
    size = generator.config.get_text_config().vocab_size
    return torch.tensor(["\n" in text for text in tokenizer.batch_decode([[token] for token in range(size)])])


def _line_end(breaks: Tensor, width: int) -> Any:
    """Stops a row (a prompt of `width` tokens, then new ones) at a line break that follows other text."""

    def ended(rows: Tensor, scores: Any, **_: Any) -> Tensor:
        new = breaks[rows[:, width:]]
        return new[:, -1] & ~new.all(1)

    return ended


def _text(tokenizer: Any, tokens: list[int]) -> str:
    """The first line of new tokens, without the end token and the padding after it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
    return text.split("\n")[0].rstrip()
