"""Defines `Task`, the interface of the training loop to data and model, and moves tensors to a device."""

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
    """Put the model into eval mode, and restore the mode of each module at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class Task(ABC):
    """Data, model, per-example losses and metrics. Examples are given by their indices in the training set."""

    model: nn.Module
    train_size: int
    """N, the number of training examples, which is public."""
    splits: tuple[Split, ...] = ("valid",)
    """The splits that are evaluated at the end, in addition to the training set."""
    exports: bool = False
    """Whether `export` is implemented."""
    headline: str = "accuracy"
    """The main metric, which the progress bar shows."""

    @abstractmethod
    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Any:
        """Read training examples; returns a batch for `losses`.

        `even` pads texts to one of a few lengths, so that many microbatches have the same shape.
        """

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses of a batch of n examples, (n,), each computed from its own example alone; never a mean."""

    def losses_of(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """The losses of n training examples, (n,)."""
        return self.losses(self.model, self.read(examples))

    @abstractmethod
    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Metrics of the current model on the first `limit` examples of a split, or on all for None.

        The model is in eval mode, without gradients. `final` adds slow metrics, such as those of generated texts.
        """

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """The numbers of examples, the source, and the "sha256" of each file, for the run's record."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Sort examples in the order in which they form microbatches: by size, the largest first."""
        return examples

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """The texts that the last final evaluation generated, by split, for the run's record."""
        return {}

    def evaluate_in_context(self, shots: int, prompt_set: int) -> dict[str, float]:
        """Metrics of the untrained model on the test set, with `shots` training examples in the prompt; not private."""
        raise UserError("eval.shots is for tasks that generate text (e2e, dart, samsum): leave it out.")

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model in a format of other libraries, with its `provenance`; called only if `exports` is True."""
        raise UserError(f"{type(self).__name__} has no export format: use model.pt in the run's folder.")


ROUND = 8
"""Lengths of texts are rounded up to a multiple of this, so that there are few shapes."""


@dataclass(frozen=True)
class Microbatch:
    """The inputs of b rows, which every stage of a pipeline has; not the activations that stages send to each other.

    Args:
        first: the input of the first stage: token ids (b, T) or images (b, C, H, W).
        kwargs: tensors with b as their first axis, for the stages that use them: attention_mask and position_ids
            (b, T), places and labels (b, P), or labels (b,) of images, and weights (b,), 0 for fillers and else 1.
        absent: the number of fillers at the end: copies of an example, with weight 0.
    """

    first: Tensor
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    absent: int = 0

    @property
    def examples(self) -> int:
        """b, including filler rows."""
        return self.first.shape[0]


class Feed(Protocol):
    """Makes microbatches of the examples of one split."""

    def __len__(self) -> int:
        """The number of examples in the split."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Sort examples by size, in the order in which they form microbatches."""

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """Split a logical batch, n indices in `order`, into at least `least` microbatches of `size` rows.

        All have the same shape, which depends only on the whole batch. An empty batch has no microbatches.
        """


def fill(examples: np.ndarray, size: int, least: int = 1) -> list[tuple[np.ndarray, int]]:
    """Split the indices of n > 0 examples, in their order, into max(⌈n / size⌉, least) microbatches of `size` rows.

    Returns for each its indices, (size,), and the number of fillers at its end, which are copies of the last example.
    """
    count = max(-(-len(examples) // size), least)
    rows = np.full(count * size, examples[-1])
    rows[: len(examples)] = examples
    absent = size - np.clip(len(examples) - size * np.arange(count), 0, size)
    return list(zip(rows.reshape(count, size), absent.tolist(), strict=True))


def row_weights(size: int, absent: int) -> Tensor:
    """The weights of a microbatch's rows, (size,): 0 for the `absent` fillers at the end, else 1."""
    return (torch.arange(size) < size - absent).float()


def rounded(length: int, most: int) -> int:
    """`length` rounded up to a multiple of `ROUND`, and at most `most`."""
    return min(-(-length // ROUND) * ROUND, most)


def to_device(value: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy a tensor or array to the device; to a GPU asynchronously, in stream order.

    A plain copy to a GPU waits for all earlier work in the stream. A copy from pinned memory is only queued, so the
    host can prepare the next microbatch. There is no other prefetching.
    """
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if device.type != "cuda" or tensor.device.type != "cpu" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def row_numbers(examples: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """The indices of n examples as a tensor, (n,) int64."""
    return to_device(np.ascontiguousarray(examples, dtype=np.int64), device)
