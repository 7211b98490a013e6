"""Joins source and target into one sequence of tokens, and pads sequences to tensors."""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.models.language import padding_position
from groupwise.training.task import to_device

IGNORED = -100
"""The label of a position that predicts nothing."""


def pad(rows: Sequence[np.ndarray], value: int, length: int = 0) -> Tensor:
    """Pad the rows on the right with `value`: (B, T) int64. T is the length of the longest row, at least `length`."""
    padded = np.full((len(rows), max(length, *(len(row) for row in rows))), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def predictions(rows: Sequence[np.ndarray], starts: Sequence[int] | np.ndarray, most: int) -> tuple[Tensor, Tensor]:
    """The positions at which a causal model predicts the tokens of row i from `starts[i]` >= 1 on, and these tokens.

    Both are (B, P). Token t is predicted at position t - 1. P is `most`, which no row exceeds; shorter rows are padded
    with position 0 and the label `IGNORED`.
    """
    positions = [np.arange(start - 1, len(row) - 1) for row, start in zip(rows, starts, strict=True)]
    labels = [row[start:] for row, start in zip(rows, starts, strict=True)]
    return pad(positions, 0, most), pad(labels, IGNORED, most)


class ModelInputs:
    """Makes the arguments of one model's forward from rows of tokens. The batch is their first axis.

    Positions are passed explicitly, because positions that a model makes itself have no batch axis. They are 0, 1, 2 …
    as in GPT-2 and BERT, or 2, 3 … where the model's own begin at 2. If the position table has a padding row p, as in
    RoBERTa, they are p + 1, p + 2 … and p at padding. Token types are passed only to models with a table for them:
    GPT-2 would look them up among its tokens.

    Args:
        model: a transformers model, or adapters around one.
        pad_token: the token at padding; any token gives the same result.
    """

    def __init__(self, model: nn.Module, pad_token: int) -> None:
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.accepts = frozenset(inspect.signature(inner.forward).parameters)
        self._pad_token = pad_token
        self._types = int(getattr(inner.config, "type_vocab_size", 0) or 0)
        self._padding_position = padding_position(inner)
        own = (int(held.flatten()[0]) for name, held in inner.named_buffers() if name.endswith("position_ids"))
        self._first = next(own, 0) if self._padding_position is None else self._padding_position + 1

    def __call__(
        self,
        rows: Sequence[np.ndarray],
        device: torch.device,
        token_types: Sequence[np.ndarray] | None = None,
        length: int = 0,
    ) -> dict[str, Any]:
        """input_ids, attention_mask (1 at tokens, 0 at padding), position_ids and token_type_ids, (B, T) int64 each.

        T is the length of the longest row, at least `length`. Only arguments that the model takes are included; its
        cache is switched off.
        """
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        tokens = pad(rows, self._pad_token, length)
        columns = torch.arange(tokens.shape[1]).expand(tokens.shape)
        positions = columns + self._first
        if self._padding_position is not None:
            positions[columns >= lengths] = self._padding_position
        made = {"input_ids": tokens, "attention_mask": (columns < lengths).long(), "position_ids": positions}
        if self._types:
            use_own = token_types is not None and self._types > 1
            made["token_type_ids"] = pad(token_types, 0, length) if use_own else torch.zeros_like(tokens)  # type: ignore[arg-type]
        inputs: dict[str, Any] = {
            name: to_device(value, device) for name, value in made.items() if name in self.accepts
        }
        return inputs | ({"use_cache": False} if "use_cache" in self.accepts else {})


CHUNK = 4096
"""How many texts are tokenised at once, because a tokeniser's output takes much more memory than the tokens."""


@dataclass(frozen=True)
class TokenRows:
    """n sequences of tokens; `cut` of them were truncated."""

    tokens: list[np.ndarray]
    cut: int

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, (n,)."""
        return np.array([len(row) for row in self.tokens])


@dataclass(frozen=True)
class Samples(TokenRows):
    """Rows of source and target; the targets begin at `starts` (n,)."""

    starts: np.ndarray

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of each target, the end of text among them, (n,)."""
        return self.lengths - self.starts


class PairEncoder:
    """Encodes sources and targets as tokens: begin, source, ending, target, end of text.

    * begin: the token that the tokeniser puts before every text, if any (Llama, Gemma, OPT; not GPT-2, Qwen).
    * ending: the last line of a dialogue, `delimiter`. Tables have no such line. If the model has one token that both
      begins and ends a text, that is the ending, as in prefix tuning (Li & Liang, 2021) and private fine-tuning of
      GPT-2 (Li et al., 2022): "source<|endoftext|> target<|endoftext|>". Otherwise it is a line break, because the
      model has never seen its begin or end token inside a sequence.

    If an example is longer than `max_length`, its source is truncated, never the tokens around it. A target that is too
    long by itself is truncated too, and loses its end token.

    Args:
        delimiter: the text at the end of every source, which the ending replaces; empty if sources have none.

    Raises:
        UserError: the tokeniser has no end of text.
    """

    def __init__(self, tokenizer: Any, delimiter: str, max_length: int) -> None:
        end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
        if end is None:
            raise UserError("The tokeniser has no end-of-text token: choose a causal model's tokeniser.")
        self._tokenizer, self._delimiter, self._most, self._end = tokenizer, delimiter, max_length, end
        self._begin = [begin] if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else []
        separated = not delimiter and begin == end
        self.ending: list[int] = [end] if separated else next(self._tokens([delimiter or "\n"]))
        """The tokens between source and target."""
        self._space = " " if delimiter or separated else ""

    @property
    def around(self) -> int:
        """Tokens of an example that belong neither to its source nor to its target, without the end token."""
        return len(self._begin) + len(self.ending)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> Samples:
        """Encode (source, target) pairs."""
        bodies = list(dict.fromkeys(self._body(source) for source, _ in pairs))  # sources repeat
        known = dict(zip(bodies, self._tokens(bodies), strict=True))
        begin, ending, space = self._begin, self.ending, self._space
        targets = self._tokens(f"{space}{target}" if target else "" for target in (t.strip() for _, t in pairs))
        rows: list[np.ndarray] = []
        starts, cut = [], 0
        for (text, _), target in zip(pairs, targets, strict=True):
            source, target = known[self._body(text)], [*target, self._end]
            whole = self.around + len(source) + len(target)
            target = target[: self._most - self.around]
            source = source[: self._most - self.around - len(target)]
            rows.append(np.array([*begin, *source, *ending, *target], dtype=np.int32))
            starts.append(len(begin) + len(source) + len(ending))
            cut += whole > self._most
        return Samples(rows, cut, np.array(starts, dtype=np.int64))

    def prompts(self, sources: Sequence[str], most: int) -> list[list[int]]:
        """Encode sources as prompts of at most `most` tokens, in the format of training."""
        return self._prompts(sources, self.ending, min(most, self._most))

    def in_context(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Encode texts of demonstrations and a source as prompts of at most `most` tokens; tables get no ending."""
        return self._prompts(texts, self.ending if self._delimiter else [], most)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(next(self._tokens([text])))

    def _prompts(self, sources: Sequence[str], ending: list[int], most: int) -> list[list[int]]:
        room = most - len(self._begin) - len(ending)
        return [[*self._begin, *source[:room], *ending] for source in self._tokens(map(self._body, sources))]

    def _body(self, source: str) -> str:
        return source.removesuffix(self._delimiter)

    def _tokens(self, texts: Iterable[str]) -> Iterator[list[int]]:
        texts = list(texts)
        for start in range(0, len(texts), CHUNK):
            part = texts[start : start + CHUNK]
            yield from self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]


PROMPT_SETS = 3
"""The paper averages over three sets of prompts (section on fine-tuning GPT-3 on SAMSum)."""


def demonstrations(
    train: Sequence[tuple[str, str]], shots: int, prompt_set: int, fits: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """The `shots` training examples of prompt set 0, 1 or 2; they are the same in every run.

    Examples are drawn in a fixed random order, no source twice, and assigned to the three sets in turn. So no example
    is in two sets. A set with fewer shots is the beginning of a set with more if no example was skipped.

    No privacy guarantee: these are unmodified training examples (source, target).

    Args:
        fits: whether a demonstration is short enough for the prompt; others are skipped.

    Raises:
        UserError: too few examples fit into a prompt for three sets.
    """
    keys = random.Random(0)
    order = sorted(range(len(train)), key=[keys.random() for _ in train].__getitem__)
    chosen: list[tuple[str, str]] = []
    sources: set[str] = set()
    for index in order:
        if len(chosen) == shots * PROMPT_SETS:
            break
        source, target = train[index]
        if source not in sources and fits(_shown(source, target)):
            sources.add(source)
            chosen.append((source, target))
    if len(chosen) < shots * PROMPT_SETS:
        raise UserError(
            f"eval.shots={shots} needs {shots * PROMPT_SETS} short examples; there are only {len(chosen)}: give fewer."
        )
    return chosen[prompt_set::PROMPT_SETS]


def in_context_prompt(shown: Sequence[tuple[str, str]], source: str) -> str:
    """The demonstrations (source, space, target), if any, and the source to continue, separated by blank lines.

    No privacy guarantee: the demonstrations are training examples.
    """
    return "\n\n".join([*(_shown(*pair) for pair in shown), source])


def _shown(source: str, target: str) -> str:
    return f"{source} {target}"
