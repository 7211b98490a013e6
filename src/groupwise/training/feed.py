"""The microbatches of one logical batch, all of one shape, as a pipeline wants them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

ROUND = 8
"""Lengths go up to a multiple of this, so that there are few different shapes."""


@dataclass(frozen=True)
class Microbatch:
    """b rows that every stage knows; what travels between stages is not here.

    Args:
        first: what the first stage reads: token ids (b, T) or images (b, C, H, W).
        kwargs: tensors with the batch as first axis, for the stages that take them: attention_mask and position_ids
            (b, T), places and labels (b, P), or labels (b,) of images, and weights (b,), 0 at fillers and else 1.
        absent: how many rows at the end are fillers: copies of an example, with weight 0.
    """

    first: Tensor
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    absent: int = 0

    @property
    def examples(self) -> int:
        """b, the fillers among them."""
        return self.first.shape[0]


class Feed(Protocol):
    """Makes microbatches of the examples of one split."""

    def __len__(self) -> int:
        """Examples in the split."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The same examples, like beside like, in the order in which they should share microbatches."""

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """One logical batch, (n,) numbers of examples in `order`, as at least `least` microbatches of `size` rows.

        All have one shape, which depends on the whole logical batch and on nothing else. No examples, no microbatches.
        """


@dataclass(frozen=True)
class Filling:
    """Which examples fill the rows of a logical batch's microbatches, and which rows are fillers.

    Args:
        rows: numbers of examples, (count, size); fillers are copies of the last example.
        absent: fillers at the end of each microbatch, (count,).
    """

    rows: np.ndarray
    absent: np.ndarray


def fill(examples: np.ndarray, size: int, least: int = 1) -> Filling:
    """Share out (n,) examples, in their order, to max(⌈n / size⌉, least) microbatches of `size` rows; n > 0."""
    count = max(-(-len(examples) // size), least)
    rows = np.full(count * size, examples[-1])
    rows[: len(examples)] = examples
    present = np.clip(len(examples) - size * np.arange(count), 0, size)
    return Filling(rows.reshape(count, size), size - present)


def rounded(length: int, most: int) -> int:
    """`length` up to a multiple of `ROUND`, and at most `most`."""
    return min(-(-length // ROUND) * ROUND, most)
