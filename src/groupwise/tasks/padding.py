"""Pads rows of unequal length to the right-padded tensors that a transformers model reads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

IGNORED = -100
"""The label of a position that predicts nothing."""


@dataclass(frozen=True)
class Rows:
    """n rows of whole numbers, one after the other: `values` (sum of lengths,) int32, `starts` (n + 1,) int64."""

    values: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> Rows:
        """From lists or arrays."""
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(np.concatenate([np.zeros(0, dtype=np.int32), *(np.asarray(row, np.int32) for row in rows)]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64."""
        return np.diff(self.starts)


def pad(rows: Sequence[np.ndarray], value: int) -> Tensor:
    """(B, T) int64: the rows, `value` to their right as far as the longest of them goes."""
    padded = np.full((len(rows), max(len(row) for row in rows)), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def predictions(rows: Sequence[np.ndarray], starts: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
    """Where a causal model predicts the tokens of row i from `starts[i]` >= 1 on, and those tokens; both (B, P).

    Token t is predicted at position t - 1. P is the most targets of a row; what pads shorter ones is position 0 with
    the label `IGNORED`.
    """
    positions = [np.arange(start - 1, len(row) - 1) for row, start in zip(rows, starts, strict=True)]
    labels = [row[start:] for row, start in zip(rows, starts, strict=True)]
    return pad(positions, 0), pad(labels, IGNORED)


class ModelInputs:
    """Makes the arguments of one model's forward from rows of tokens, each with the batch as its first axis.

    Positions are explicit, because a model that makes its own makes one row for all examples, which no per-example
    gradient can be taken of: 0, 1, 2 … as in GPT-2 and BERT, or, where the table of positions has a padding row p, as
    in RoBERTa, p + 1, p + 2 … and p at padding. Token types are passed only to models with a table for them (GPT-2
    would add token embeddings instead).

    Args:
        model: a transformers model, or adapters around one.
        pad_token: the token at padding; which one it is changes nothing.
    """

    def __init__(self, model: nn.Module, pad_token: int) -> None:
        inner = _without_adapters(model)
        self.accepts = frozenset(inspect.signature(inner.forward).parameters)
        self._pad_token = pad_token
        self._types = int(getattr(inner.config, "type_vocab_size", 0) or 0)
        self._padding_position = _padding_position(inner)

    def __call__(
        self, rows: Sequence[np.ndarray], device: torch.device, token_types: Sequence[np.ndarray] | None = None
    ) -> dict[str, Any]:
        """input_ids, attention_mask (1 at tokens, 0 at padding), position_ids and token_type_ids, (B, T) int64 each.

        T is the longest row. Only what the model takes is there, and no cache where it has one.
        """
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        tokens = pad(rows, self._pad_token)
        columns = torch.arange(tokens.shape[1]).expand(tokens.shape)
        made = {"input_ids": tokens, "attention_mask": (columns < lengths).long(), "position_ids": columns}
        if self._padding_position is not None:
            shifted = columns + self._padding_position + 1
            made["position_ids"] = torch.where(columns < lengths, shifted, self._padding_position)
        if self._types:
            use_own = token_types is not None and self._types > 1
            made["token_type_ids"] = pad(token_types, 0) if use_own else torch.zeros_like(tokens)  # type: ignore[arg-type]
        inputs: dict[str, Any] = {name: value.to(device) for name, value in made.items() if name in self.accepts}
        return inputs | ({"use_cache": False} if "use_cache" in self.accepts else {})


def _without_adapters(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _padding_position(model: nn.Module) -> int | None:
    """The row of the table of positions that stands for padding, where there is one."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.padding_idx
    return None
