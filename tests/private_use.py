"""A correct private training of a small model by `make_private`, from which the tests of misuse deviate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from groupwise import make_private
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource

EXAMPLES, BATCH, MICROBATCH = 40, 20, 7
Misuse = tuple[Callable[[], object], str]
"""A wrong call, and a pattern that matches the error message."""
X = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
DATA = TensorDataset(X, Y)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """One loss for each example of a batch."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


class Use:
    """A model, an optimiser and their private training, with batches of several microbatches each."""

    def __init__(
        self,
        model: nn.Module | None = None,
        data: Any = DATA,
        seed: int = 3,
        optimizer: torch.optim.Optimizer | None = None,
        losses: Any = cross_entropy,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or network()
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        settings = {"noise_multiplier": 1.0, "steps": 3, "batch_size": BATCH, "accountant": "rdp", "delta": 1e-3}
        own = {"microbatch": MICROBATCH, "noise_source": NoiseSource.from_seed(seed)}
        self.private = make_private(self.model, self.optimizer, data, losses, **{**settings, **own, **options})

    def train(self, steps: int | None = None) -> "Use":
        for _ in self.private.steps(steps):
            pass
        return self

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def network(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *more, nn.Linear(8, 2))


def refuses(do: Callable[[], object], message: str) -> None:
    """Assert that `do` raises a UserError of one sentence that matches `message`."""
    with pytest.raises(UserError, match=message) as caught:
        do()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
