"""Makes microbatches of one shape for a pipeline: texts padded to the longest of the logical batch, and images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.tasks.samples import IGNORED, Samples, pad, predictions
from groupwise.tasks.text_task import longest_first
from groupwise.training.task import Microbatch, fill, rounded, row_numbers, to_device


class TextFeed:
    """Sources and targets, right-padded; see `training.task.Feed`.

    T is the longest of the logical batch, P the most target tokens in it; both are rounded up to a multiple of 8 (at
    most `max_length`).

    Args:
        samples: of one split.
        pad_token: the token at padding; which one it is changes nothing.
        max_length: the longest that an example can be.
        device: of the microbatches.
    """

    def __init__(self, samples: Samples, pad_token: int, max_length: int, device: torch.device) -> None:
        self._samples, self._pad_token, self._most, self._device = samples, pad_token, max_length, device

    def __len__(self) -> int:
        return len(self._samples)

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Longest first."""
        return examples[longest_first(self._samples.tokens.lengths[examples])]

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`; places and labels (b, P) are as `padding.predictions` makes them."""
        if not len(examples):
            return []
        length = rounded(int(self._samples.tokens.lengths[examples].max()), self._most)
        places = rounded(int(self._samples.target_lengths[examples].max()), self._most)
        filling = fill(examples, size, least)
        return [
            self._microbatch(rows, absent, length, places)
            for rows, absent in zip(filling.rows, filling.absent.tolist(), strict=True)
        ]

    def _microbatch(self, rows: np.ndarray, absent: int, length: int, most: int) -> Microbatch:
        tokens = [self._samples.tokens[i] for i in rows]
        places, labels = predictions(tokens, self._samples.starts[rows])
        columns = torch.arange(length).expand(len(rows), length)
        made = {
            "attention_mask": (columns < torch.tensor([[len(row)] for row in tokens])).long(),
            "position_ids": columns.clone(),
            "places": _widen(places, 0, most),
            "labels": _widen(labels, IGNORED, most),
            "weights": _weights(len(rows), absent),
        }
        first = _widen(pad(tokens, self._pad_token), self._pad_token, length)
        return Microbatch(
            to_device(first, self._device),
            {name: to_device(value, self._device) for name, value in made.items()},
            absent,
        )


class ImageFeed:
    """Images and their classes, as the model reads them and without augmentation; see `training.task.Feed`.

    Args:
        images: of one split, (n, C, H, W) uint8.
        labels: their classes, (n,).
        prepare: from such images to those that the model reads.
        device: of the microbatches.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, prepare: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self._images, self._labels, self._prepare, self._device = images, labels, prepare, device

    def __len__(self) -> int:
        return len(self._images)

    def order(self, examples: np.ndarray) -> np.ndarray:
        """As they are: all have one size."""
        return examples

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`; labels are (b,)."""
        if not len(examples):
            return []
        filling = fill(examples, size, least)
        return [
            self._microbatch(row_numbers(rows, self._images.device), absent)
            for rows, absent in zip(filling.rows, filling.absent.tolist(), strict=True)
        ]

    def _microbatch(self, rows: Tensor, absent: int) -> Microbatch:
        made = {"labels": self._labels[rows], "weights": _weights(len(rows), absent)}
        images = to_device(self._prepare(self._images[rows]), self._device)
        return Microbatch(images, {name: to_device(value, self._device) for name, value in made.items()}, absent)


def _weights(size: int, absent: int) -> Tensor:
    """(size,): 1, and 0 for the fillers at the end."""
    return (torch.arange(size) < size - absent).float()


def _widen(rows: Tensor, value: int, width: int) -> Tensor:
    """More columns of `value`, up to `width`."""
    return F.pad(rows, (0, width - rows.shape[1]), value=value)
