"""Defines a task, the interface of the training loop to data and model; moves tensors to a device."""

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
    """Put the model into eval mode inside, and restore each module's mode afterwards."""
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
    """Splits that are evaluated at the end, in addition to the training set."""
    exports: bool = False
    """Whether `export` is implemented."""
    headline: str = "accuracy"
    """The metric to show where there is room for only one."""

    @abstractmethod
    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Any:
        """A batch of these training examples, for `losses`.

        `even` pads texts to one of few lengths, so that many microbatches have the same shapes.
        """

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss for each example of a batch, (n,), computed from that example alone; never a mean."""

    def losses_of(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """The losses of these training examples, (n,)."""
        return self.losses(self.model, self.read(examples))

    @abstractmethod
    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Metrics of the current model, in eval mode, on the first `limit` examples of a split.

        `final` adds metrics that are too slow to compute during training, such as those of generated texts.
        """

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Counts, source and "sha256" of the files by name, for the run's record."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The same examples in the order in which they are put into microbatches: by size, the largest first."""
        return examples

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the last final evaluation generated, by split, for the run's record."""
        return {}

    def evaluate_in_context(self, shots: int, prompt_set: int) -> dict[str, float]:
        """Metrics on the test set of the model as loaded, with `shots` training examples in the prompt; not private."""
        raise UserError("eval.shots is for tasks that generate text (e2e, dart, samsum): leave it out.")

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs, and `provenance` beside it; called only if `exports` is True."""
        raise UserError(f"{type(self).__name__} has no export format: take model.pt from the run's folder.")


ROUND = 8
"""Lengths are rounded up to a multiple of this, so that there are few different shapes."""


@dataclass(frozen=True)
class Microbatch:
    """The inputs of b rows, known to every stage; without the activations that stages send each other.

    Args:
        first: the input of the first stage: token ids (b, T) or images (b, C, H, W).
        kwargs: tensors with the batch as first axis, for the stages that take them: attention_mask and position_ids
            (b, T), places and labels (b, P), or labels (b,) of images, and weights (b,), 0 at fillers and else 1.
        absent: how many rows at the end are fillers: copies of an example, with weight 0.
    """

    first: Tensor
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    absent: int = 0

    @property
    def examples(self) -> int:
        """b, filler rows included."""
        return self.first.shape[0]


class Feed(Protocol):
    """Makes microbatches of the examples of one split."""

    def __len__(self) -> int:
        """Examples in the split."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The same examples, sorted by size, in the order in which they should be put into microbatches."""

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """One logical batch, (n,) numbers of examples in `order`, as at least `least` microbatches of `size` rows.

        All have one shape, which depends only on the whole logical batch. Without examples there are no microbatches.
        """


def fill(examples: np.ndarray, size: int, least: int = 1) -> list[tuple[np.ndarray, int]]:
    """Split (n,) examples, in their order, into max(⌈n / size⌉, least) microbatches of `size` rows; n > 0.

    Returns:
        For each microbatch the indices of its examples, (size,), and how many of its last rows are fillers: copies of
        the last example.
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
    """Copy a tensor or array to the device; to a GPU asynchronously, in the order of its stream.

    A plain copy to a GPU would wait for all earlier work in the stream, once per microbatch. From pinned memory the
    copy is queued, and the host prepares the next microbatch meanwhile. There is no other prefetching.
    """
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if device.type != "cuda" or tensor.device.type != "cpu" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def row_numbers(examples: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Indices of examples as a tensor, (n,) int64."""
    return to_device(np.ascontiguousarray(examples, dtype=np.int64), device)
