"""What the training loop must know of a task, and nothing more."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

Split = Literal["train", "valid"]


class Task(Protocol):
    """Data, model, per-example loss and metrics. Examples are addressed by their index in the training set."""

    model: nn.Module
    train_size: int
    """N, public."""

    def losses(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """One loss for each of these training examples, (n,): of that example alone, never a mean over others."""
        ...

    def evaluate(self, split: Split, batch_size: int, limit: int | None = None) -> dict[str, float]:
        """Metrics of the model as it stands, in eval mode, on the first `limit` examples of a split."""
        ...

    def describe_data(self) -> dict[str, Any]:
        """Counts, source and checksums, for the run's record."""
        ...
