"""A model whose per-example gradients are given numbers, so that neighbouring data sets can be as bad as they get."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.training.task import Split, Task


class Linears(nn.Module):
    """A loss that is linear in the weights: Σ_k Σ_u ⟨w_k, x_ku⟩, whose gradient in layer k is Σ_u x_ku whatever w is.

    Args:
        layers: K. uses: U, how often each layer is called; above 1 its weight is tied to itself. width: entries of w_k.
    """

    def __init__(self, layers: int, uses: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, K, U, width) -> losses (B,)."""
        values = [layer(x[:, k, u]) for k, layer in enumerate(self.layers) for u in range(x.shape[2])]
        return torch.cat(values, 1).sum(1)


class Given(Task):
    """Examples that are gradients: x (N, K, U, width)."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.train_size = x, len(x)
        self.model = Linears(*x.shape[1:]).to(x.dtype)

    def losses(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """⟨w, x⟩ of each, (n,)."""
        return self.model(self.x[np.asarray(examples)])

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Nothing to measure."""
        return {}

    def describe_data(self) -> dict[str, object]:
        """Nothing to say."""
        return {}
