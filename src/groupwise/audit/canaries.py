"""Canaries: models in which the gradients of different examples have no entry in common, as a task for the trainer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import Tensor, nn

from groupwise.training.task import Microbatch, Split, Task, fill, row_weights

AT_ONCE = 500
"""The number of canaries in one backward pass of the attacker."""
LOUD = 30.0
"""Norm of a canary's gradient in units of the threshold. It is large, so that adaptive thresholds still clip it."""


class Picked(nn.Module):
    """A linear layer with one output per canary. Canary i uses row i of the weight and entry i of the bias."""

    def __init__(self, canaries: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, canaries)

    def forward(self, who: Tensor) -> Tensor:
        """Map indices of canaries (b,) to one sum each, (b,)."""
        ones = torch.ones(len(who), self.linear.in_features, device=who.device)
        return self.linear(ones).gather(1, who.unsqueeze(1)).squeeze(1)


class Block(nn.Module):
    """Two layers: two groups for `fixed_layer`, one group for `fixed_block`."""

    def __init__(self, canaries: int, loudness: float) -> None:
        super().__init__()
        self.loudness = loudness
        self.rows = nn.Embedding(canaries, 2)
        self.picked = Picked(canaries, 3)

    def forward(self, who: Tensor) -> Tensor:
        """Map indices of canaries (b,) to one value each, (b,)."""
        return self.loudness * (self.rows(who).sum(1) + 0.5 * self.picked(who))


class Layers(nn.Module):
    """A layer, two blocks and another layer: six groups for per-layer clipping, four for per-block clipping."""

    def __init__(self, canaries: int, level: float) -> None:
        super().__init__()
        self.level = level
        self.stem = nn.Linear(canaries, 2, bias=False)
        self.blocks = nn.ModuleList([Block(canaries, 1.0), Block(canaries, 3.0)])
        self.head = Picked(canaries, 2)

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        own = F.one_hot(who, self.stem.in_features).float()
        total = 2.0 * self.stem(own).sum(1) + self.head(who)
        for block in self.blocks:
            total = total + block(who)
        return self.level * total


class Codes(nn.Module):
    """A layer per canary. Canary i is clipped in half of them, which row i of a Hadamard matrix selects.

    The bits ±½ of the canaries are orthogonal in the vector of counts. So each canary changes the counts by its full
    norm ½√K, independently of the others.
    """

    loud: Tensor

    def __init__(self, canaries: int, level: float) -> None:
        super().__init__()
        self.rows = nn.ModuleList([nn.Embedding(canaries, 1) for _ in range(canaries)])
        signs = torch.from_numpy(hadamard(canaries)).float()
        self.register_buffer("loud", level * torch.where(signs > 0, 2.0, 0.5))

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        parts = [self.loud[k][who] * row(who).squeeze(1) for k, row in enumerate(self.rows)]
        return torch.stack(parts).sum(0)


class CanaryTask(Task):
    """A task of canaries, without an evaluation.

    In a pipeline it is its own feed, in which a canary's input is its index, for every stage.
    """

    splits = ()

    def __init__(self, model: nn.Module, canaries: int) -> None:
        self.model, self.train_size = model, canaries

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Tensor:
        """Return the indices of the canaries, (n,)."""
        return torch.as_tensor(np.asarray(examples, dtype=np.int64))

    def losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return one loss for each canary, (n,)."""
        return model(batch)

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def describe_data(self) -> dict[str, Any]:
        """Return the number of canaries."""
        return {"train_examples": self.train_size, "source": "canaries"}

    def feed(self, split: Split, device: torch.device) -> "CanaryTask":
        """Return the feed of indices."""
        return self

    def __len__(self) -> int:
        return self.train_size

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Unchanged."""
        return examples

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`."""
        if not len(examples):
            return []
        filled = [(torch.from_numpy(rows), absent) for rows, absent in fill(examples, size, least)]
        return [
            Microbatch(
                who.unsqueeze(1).expand(-1, 3),
                {"labels": who, "weights": row_weights(len(who), absent), "places": who},
                absent,
            )
            for who, absent in filled
        ]


class Present:
    """Restricts the draws of another sampler to the examples in the data.

    Poisson draws are independent, so this is a Poisson sample of these data at the same rate.
    """

    def __init__(self, sampler: Any, present: np.ndarray) -> None:
        self._sampler, self._present = sampler, present

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of step ``step`` that are in the data, (n,)."""
        drawn = self._sampler.indices(step)
        return drawn[self._present[drawn]]


def own_gradients(
    losses_of: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, canaries: int
) -> dict[str, Tensor]:
    """Return the unclipped gradients of all canaries, (m, d_p) for each parameter name, from a model without an engine.

    Canaries have no entries in common, so each one's gradient is a slice of the gradient of all losses together.
    """
    for who in torch.arange(canaries).split(AT_ONCE):
        losses_of(model, who).sum().backward()
    found = {name: by_canary(p.grad, canaries) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def by_canary(tensor: Tensor, canaries: int) -> Tensor:
    """Reshape a tensor that has an axis of length m to (m, d)."""
    return tensor.movedim(list(tensor.shape).index(canaries), 0).reshape(canaries, -1)
