"""A source and its target as one sequence of tokens for a causal model, cut where it is too long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.errors import UserError
from groupwise.tasks.padding import Rows

CHUNK = 4096
"""Texts that are tokenised at once: a tokeniser's answer is much larger than the tokens."""


@dataclass(frozen=True)
class Samples:
    """n sequences of source and target; the targets begin at `starts` (n,); `cut` is how many were too long."""

    tokens: Rows
    starts: np.ndarray
    cut: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of each target, the end of text among them, (n,)."""
        return self.tokens.lengths - self.starts


class PairEncoder:
    """source, ending, " " + target, end of text: the ending tells the model that the target comes now.

    For tables (E2E, DART) the ending is the beginning-of-text token, as in prefix tuning (Li & Liang, 2021) and private
    fine-tuning of GPT-2 (Li et al., 2022), whose examples read "source <|endoftext|> target <|endoftext|>"; the space
    before each of the two is left out here. For dialogues it is the source's own last line, "TL;DR".

    What is longer than `max_length` loses the end of its source, never the ending; a target that is too long by itself
    loses its own end, and the end of text with it.

    Args:
        tokenizer: of a causal model.
        ending: the end of every source that is never cut; empty for the beginning-of-text token.
        max_length: tokens.
    """

    def __init__(self, tokenizer: Any, ending: str, max_length: int) -> None:
        self._tokenizer, self._text, self._most = tokenizer, ending, max_length
        if tokenizer.eos_token_id is None:
            raise UserError("The tokeniser has no end-of-text token, which ends each target: choose a causal model's.")
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.ending: list[int] = next(self._tokens([ending])) if ending else [begin]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> Samples:
        """Encode (source, target) pairs."""
        bodies = list(dict.fromkeys(self._body(source) for source, _ in pairs))  # sources repeat
        known = dict(zip(bodies, self._tokens(bodies), strict=True))
        targets = self._tokens(f" {target}" if target else "" for target in (t.strip() for _, t in pairs))
        rows: list[np.ndarray] = []
        starts, cut = [], 0
        for (text, _), target in zip(pairs, targets, strict=True):
            source, target = known[self._body(text)], [*target, self._tokenizer.eos_token_id]
            whole = len(source) + len(self.ending) + len(target)
            target = target[: self._most - len(self.ending)]
            source = source[: self._most - len(self.ending) - len(target)]
            rows.append(np.array([*source, *self.ending, *target], dtype=np.int32))
            starts.append(len(source) + len(self.ending))
            cut += whole > self._most
        return Samples(Rows.of(rows), np.array(starts, dtype=np.int64), cut)

    def prompts(self, sources: Sequence[str], most: int) -> list[list[int]]:
        """Encode sources alone, as in training and in `most` tokens: what a target is generated from."""
        return self._prompts(sources, self.ending, min(most, self._most))

    def in_context(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Encode demonstrations and a source, one text, in `most` tokens; no token stands between source and target."""
        return self._prompts(texts, self.ending if self._text else [], most)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(next(self._tokens([text])))

    def _prompts(self, sources: Sequence[str], ending: list[int], most: int) -> list[list[int]]:
        return [[*source[: most - len(ending)], *ending] for source in self._tokens(map(self._body, sources))]

    def _body(self, source: str) -> str:
        return source.removesuffix(self._text) if self._text else source

    def _tokens(self, texts: Iterable[str]) -> Iterator[list[int]]:
        texts = list(texts)
        for start in range(0, len(texts), CHUNK):
            part = texts[start : start + CHUNK]
            yield from self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
