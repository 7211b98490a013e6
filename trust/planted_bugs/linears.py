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
        dropout: the rate at which entries of x are dropped out.
    """

    def __init__(self, layers: int, uses: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, K, U, width) -> losses (B,)."""
        x = self.dropout(x)
        values = [layer(x[:, k, u]) for k, layer in enumerate(self.layers) for u in range(x.shape[2])]
        return torch.cat(values, 1).sum(1)


class Given(Task):
    """Examples that are gradients: x (N, K, U, width). With dropout the last is taken first, as the longest text is."""

    def __init__(self, x: Tensor, dropout: float = 0.0) -> None:
        self.x, self.train_size, self._turned = x, len(x), dropout > 0
        _, layers, uses, width = x.shape
        self.model = Linears(layers, uses, width, dropout).to(x.dtype)

    def order(self, examples: np.ndarray) -> np.ndarray:
        """As they are, or the other way round."""
        return examples[::-1].copy() if self._turned else examples

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
