"""What the training loop must know of a task, and nothing more."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from groupwise.errors import UserError

Split = Literal["train", "valid", "test"]


class Task(ABC):
    """Data, model, per-example loss and metrics. Examples are addressed by their index in the training set."""

    model: nn.Module
    train_size: int
    """N, public."""
    splits: tuple[Split, ...] = ("valid",)
    """What is evaluated at the end, beside the training set."""
    exports: bool = False
    """Whether `export` knows a format."""
    headline: str = "accuracy"
    """The metric that stands for the others where there is room for one."""

    @abstractmethod
    def losses(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """One loss for each of these training examples, (n,): of that example alone, never a mean over others."""

    @abstractmethod
    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Metrics of the model as it stands, in eval mode, on the first `limit` examples of a split.

        `final` adds what is too slow for every few epochs, such as generation.
        """

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Counts, source and checksums, for the run's record."""

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The same examples in the order in which they share microbatches: the largest first, like beside like."""
        return examples

    def check_update(self, step: int) -> None:  # noqa: B027 (most tasks have nothing to look at)
        """Look at the weights after step `step` (0-based); raises `UserError` when some did not learn."""

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the last final evaluation made, by split, for the run's record."""
        return {}

    def evaluate_in_context(self, shots: int, prompt_set: int) -> dict[str, float]:
        """Metrics on the test set of the model as loaded, with `shots` training examples in the prompt; not private."""
        raise UserError("eval.shots is for tasks that generate text (e2e, dart, samsum): leave it out.")

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs, and `provenance` beside it; asked for only where `exports` says so."""
        raise UserError(f"{type(self).__name__} knows no format to export to: take model.pt from the run's folder.")
