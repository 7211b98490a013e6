"""Makes canaries: models in which the gradients of different examples share no entry, as a task for the trainer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import Tensor, nn

from groupwise.training.private_step import Sampler
from groupwise.training.task import Microbatch, Split, Task, fill, row_weights

LOUD = 30.0
"""Norm of a canary's gradient in units of the threshold, so that adaptive thresholds may grow and still clip."""


class Picked(nn.Module):
    """A linear layer with one output a canary: canary i is row i of the weight and entry i of the bias."""

    def __init__(self, canaries: int, width: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, canaries, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, who: Tensor) -> Tensor:
        """Numbers of canaries (b,) → a sum each, (b,)."""
        ones = torch.ones(len(who), self.linear.in_features, device=who.device)
        return self.linear(self.dropout(ones)).gather(1, who.unsqueeze(1)).squeeze(1)


class Block(nn.Module):
    """Two layers: a group of each in `fixed_layer`, one group of both in `fixed_block`."""

    def __init__(self, canaries: int, loudness: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.loudness = loudness
        self.rows = nn.Embedding(canaries, 2)
        self.dropout = nn.Dropout(dropout)
        self.picked = Picked(canaries, 3, dropout=dropout)

    def forward(self, who: Tensor) -> Tensor:
        """(b,) → (b,)."""
        return self.loudness * (self.dropout(self.rows(who)).sum(1) + 0.5 * self.picked(who))


class Layers(nn.Module):
    """A layer before two blocks and one behind them: six groups per layer, four per block."""

    def __init__(self, canaries: int, level: float, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.level = level
        self.stem = self.front(canaries)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(canaries, 1.0, dropout), Block(canaries, 3.0, dropout)])
        self.head = Picked(canaries, 2, bias, dropout)

    def front(self, canaries: int) -> nn.Module:
        """The first layer."""
        return nn.Linear(canaries, 2, bias=False)

    def ends(self, who: Tensor) -> Tensor:
        """The part of the losses (b,) of the layers around the blocks."""
        own = F.one_hot(who, len(self.head.linear.weight)).float()
        return 2.0 * self.dropout(self.stem(own)).sum(1) + self.head(who)

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        total = self.ends(who)
        for block in self.blocks:
            total = total + block(who)
        return self.level * total


class Tied(Layers):
    """A table that is read twice, as an embedding and as the layer in front of the losses, beside two blocks."""

    def __init__(self, canaries: int, level: float, dropout: float = 0.0) -> None:
        super().__init__(canaries, level, dropout, bias=False)
        self.head.linear.weight = self.stem.weight  # type: ignore[assignment]

    def front(self, canaries: int) -> nn.Module:
        """The table."""
        return nn.Embedding(canaries, 2)

    def ends(self, who: Tensor) -> Tensor:
        """See `Layers`."""
        return self.dropout(self.stem(who)).sum(1) + 2.0 * self.head(who)


class Adapted(nn.Module):
    """A frozen square layer, which gets an adapter B·A: canary i is column i of A and row i of B."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.square = nn.Linear(canaries, canaries, bias=False)

    def forward(self, who: Tensor) -> Tensor:
        """(b,) → (b,)."""
        own = F.one_hot(who, self.square.in_features).float()
        return self.square(own).gather(1, who.unsqueeze(1)).squeeze(1)


class Frozen(nn.Module):
    """Two blocks of a frozen layer each, to be adapted by peft."""

    def __init__(self, canaries: int, level: float) -> None:
        super().__init__()
        self.level = 100.0 * level  # an adapter's gradient is of the size of its other factor
        self.blocks = nn.ModuleList([Adapted(canaries), Adapted(canaries)])

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        return self.level * torch.stack([block(who) for block in self.blocks]).sum(0)


class Codes(nn.Module):
    """As many layers as canaries: canary i is clipped in half of them, by row i of a Hadamard matrix.

    The bits ±½ of such codes are orthogonal in the vector of counts, so each canary changes the counts by its full norm
    ½√K, independently of the others.
    """

    loud: Tensor

    def __init__(self, canaries: int, level: float, dropout: float = 0.0) -> None:
        super().__init__()
        assert not dropout, "a canary is read from its bits, which a mask would flip"
        self.rows = nn.ModuleList([nn.Embedding(canaries, 1) for _ in range(canaries)])
        signs = torch.from_numpy(hadamard(canaries)).float()
        self.register_buffer("loud", level * torch.where(signs > 0, 2.0, 0.5))

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        parts = [self.loud[k][who] * row(who).squeeze(1) for k, row in enumerate(self.rows)]
        return torch.stack(parts).sum(0)


def lora(canaries: int, level: float, dropout: float = 0.0) -> nn.Module:
    """`Frozen` with peft's adapters of rank 2, none of them zero, behind peft's own dropout."""
    from groupwise.torchvision_import import mend_torchvision

    mend_torchvision()
    import peft

    config = peft.LoraConfig(r=2, target_modules=["square"], init_lora_weights=False, lora_dropout=dropout)
    return peft.get_peft_model(Frozen(canaries, level), config)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[int, float, float], nn.Module]] = {
    "layers": Layers,
    "tied": Tied,
    "lora": lora,
    "codes": Codes,
}


def make_canaries(name: str, canaries: int, level: float, seed: int, dropout: float = 0.0) -> nn.Module:
    """The model of that name for m canaries; ``level`` is the largest norm that any group lets through.

    ``dropout`` is its rate, at inputs and outputs of layers; codes have none.
    """
    torch.manual_seed(seed)
    return MODELS[name](canaries, level if name == "codes" else LOUD * level, dropout)


class CanaryTask(Task):
    """A task of canaries, without an evaluation."""

    splits = ()

    def __init__(self, model: nn.Module, canaries: int) -> None:
        self.model, self.train_size = model, canaries

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Tensor:
        """Their numbers, (n,)."""
        return torch.as_tensor(np.asarray(examples, dtype=np.int64))

    def losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        """One loss each, (n,)."""
        return model(batch)

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Nothing."""
        return {}

    def describe_data(self) -> dict[str, Any]:
        """The number of canaries."""
        return {"train_examples": self.train_size, "source": "canaries"}

    def feed(self, split: Split, device: torch.device) -> "CanaryFeed":
        """Their numbers, for a pipeline."""
        return CanaryFeed(self.train_size)


class CanaryFeed:
    """A canary is its number, which every stage gets; see `groupwise.training.task.Feed`."""

    def __init__(self, canaries: int) -> None:
        self._canaries = canaries

    def __len__(self) -> int:
        return self._canaries

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Unchanged."""
        return examples

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`."""
        if not len(examples):
            return []
        filled = [(torch.from_numpy(rows), absent) for rows, absent in fill(examples, size, least)]
        return [
            Microbatch(who.unsqueeze(1), {"labels": who, "weights": row_weights(len(who), absent)}, absent)
            for who, absent in filled
        ]


class Present:
    """The draws of another sampler, without the examples that are not in the data.

    Poisson draws are independent, so the rest is a Poisson sample of the remaining data at the same rate.
    """

    def __init__(self, sampler: Sampler, present: np.ndarray) -> None:
        self._sampler, self._present = sampler, present

    def indices(self, step: int) -> np.ndarray:
        """The examples of step ``step`` that are there, (n,)."""
        drawn = self._sampler.indices(step)
        return drawn[self._present[drawn]]


def own_gradients(
    losses_of: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, canaries: int, at_once: int
) -> dict[str, Tensor]:
    """Parameter name → every canary's unclipped gradient in it, (m, d_p), from an unattached model.

    No two canaries share an entry, so the gradient of all losses together holds each canary's own in its slice.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for who in torch.arange(canaries).split(at_once):
        losses_of(model, who).sum().backward()
    found = {}
    for name, parameter in named.items():
        assert parameter.grad is not None
        found[name] = by_canary(parameter.grad, canaries)
        parameter.grad = None
    return found


def by_canary(tensor: Tensor, canaries: int) -> Tensor:
    """A tensor with one axis of length m as (m, d)."""
    return tensor.movedim(list(tensor.shape).index(canaries), 0).reshape(canaries, -1)
