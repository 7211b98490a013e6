"""Defines what the training loop must know of a task, and nothing more; moves what a task made to a device."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.errors import UserError

Split = Literal["train", "valid", "test"]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards the mode that each module was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class Task(ABC):
    """Data, model, per-example loss and metrics. Examples are addressed by their index in the training set."""

    model: nn.Module
    train_size: int
    """N, public."""
    splits: tuple[Split, ...] = ("valid",)
    """Splits that are evaluated at the end, beside the training set."""
    exports: bool = False
    """Whether `export` knows a format."""
    headline: str = "accuracy"
    """The metric that stands for the others where there is room for one."""

    @abstractmethod
    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Any:
        """A batch of these training examples: what `losses` takes.

        `even` pads texts to lengths of which there are few, so that many microbatches have the same shapes.
        """

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss for each example of a batch, (n,): of that example alone, never a mean over others."""

    def losses_of(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """The losses of these training examples, (n,)."""
        return self.losses(self.model, self.read(examples))

    @abstractmethod
    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Metrics of the model as it stands, in eval mode, on the first `limit` examples of a split.

        `final` adds what is too slow for every few epochs, such as generation.
        """

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Counts, source and "sha256" of the files by name, for the run's record."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The same examples in the order in which they share microbatches: the largest first, like beside like."""
        return examples

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the last final evaluation made, by split, for the run's record."""
        return {}

    def evaluate_in_context(self, shots: int, prompt_set: int) -> dict[str, float]:
        """Metrics on the test set of the model as loaded, with `shots` training examples in the prompt; not private."""
        raise UserError("eval.shots is for tasks that generate text (e2e, dart, samsum): leave it out.")

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs, and `provenance` beside it; asked for only where `exports` says so."""
        raise UserError(f"{type(self).__name__} knows no format to export to: take model.pt from the run's folder.")


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


def fill(examples: np.ndarray, size: int, least: int = 1) -> list[tuple[np.ndarray, int]]:
    """Share out (n,) examples, in their order, to max(⌈n / size⌉, least) microbatches of `size` rows; n > 0.

    Returns:
        Of each microbatch the numbers of its examples, (size,), and how many at its end are fillers, copies of the last
        example.
    """
    count = max(-(-len(examples) // size), least)
    rows = np.full(count * size, examples[-1])
    rows[: len(examples)] = examples
    absent = size - np.clip(len(examples) - size * np.arange(count), 0, size)
    return list(zip(rows.reshape(count, size), absent.tolist(), strict=True))


def row_weights(size: int, absent: int) -> Tensor:
    """(size,): 1, and 0 for the fillers at the end."""
    return (torch.arange(size) < size - absent).float()


def rounded(length: int, most: int) -> int:
    """`length` up to a multiple of `ROUND`, and at most `most`."""
    return min(-(-length // ROUND) * ROUND, most)


def to_device(value: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """The tensor, or the array's, on the device; on a GPU it is there once the queue has come to it.

    A plain copy to a GPU waits until all work that was queued before it is done, once a microbatch. From page-locked
    memory it takes its turn in the queue, and the host makes the next microbatch meanwhile: there is no other
    prefetching.
    """
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if device.type != "cuda" or tensor.device.type != "cpu" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def row_numbers(examples: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Numbers of examples as an index, (n,) int64."""
    return to_device(np.ascontiguousarray(examples, dtype=np.int64), device)
