"""Classifies tumours as benign or malignant from 30 measurements: a task of your own (docs/extending.md)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.config.schema import RunConfig
from groupwise.training.task import Split, Task


class Tumors(Task):
    """Cross-entropy and accuracy; the first 100 rows are the validation set."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.train_size = model, len(x) - 100
        self._rows = {"train": (x[100:], y[100:]), "valid": (x[:100], y[:100])}

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> tuple[Tensor, Tensor]:
        """Measurements (n, 30) and classes (n,) of these training examples."""
        x, y = self._rows["train"]
        return x[examples], y[examples]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of each example, (n,)."""
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Accuracy in percent, mean cross-entropy."""
        x, y = (part[:limit] for part in self._rows[split])
        logits = self.model(x)
        accuracy = (logits.argmax(1) == y).double().mean()
        return {"accuracy": 100 * float(accuracy), "loss": float(F.cross_entropy(logits, y))}

    def describe_data(self) -> dict[str, Any]:
        """Source and counts; no file to hash."""
        counts = {"train_examples": self.train_size, "valid_examples": 100}
        return {"source": "load_breast_cancer", "sha256": {}, **counts, "selected_on": "nothing"}


def make_tumors(config: RunConfig, device: torch.device, hidden: int = 16) -> Tumors:
    """A network with one hidden layer, and the data that come with scikit-learn."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    model = nn.Sequential(nn.Linear(30, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    inputs = torch.tensor(x, dtype=torch.float32, device=device)
    return Tumors(model.to(device), torch.log(0.01 + inputs), torch.tensor(y, device=device))
