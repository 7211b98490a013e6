"""Models whose examples ("canaries") have gradients that do not meet: the strongest attack that one run allows.

Every trained parameter has one axis of length m, the number of canaries, and canary i's gradient lies in its i-th slice
alone. So the auditor reads what a release says of canary i without the others in the way. Losses are linear in each
layer's parameters, and so large that every group clips every canary. With dropout a canary's direction is that of its
mask, which the auditor does not know.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import Tensor, nn

from groupwise.errors import UserError

LOUD = 30.0
"""Norms of a canary's gradient, in thresholds: adaptive ones may grow for a few steps and still clip."""


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

    def __init__(self, canaries: int, level: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.level = level
        self.stem = nn.Linear(canaries, 2, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(canaries, 1.0, dropout), Block(canaries, 3.0, dropout)])
        self.head = Picked(canaries, 2, dropout=dropout)

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        own = F.one_hot(who, self.stem.in_features).float()
        total = 2.0 * self.dropout(self.stem(own)).sum(1) + self.head(who)
        for block in self.blocks:
            total = total + block(who)
        return self.level * total


class Tied(nn.Module):
    """A table that is read twice, as an embedding and as the layer in front of the losses, beside two blocks."""

    def __init__(self, canaries: int, level: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.level = level
        self.embedding = nn.Embedding(canaries, 2)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(canaries, 1.0, dropout), Block(canaries, 3.0, dropout)])
        self.head = Picked(canaries, 2, bias=False, dropout=dropout)
        self.head.linear.weight = self.embedding.weight

    def forward(self, who: Tensor) -> Tensor:
        """Losses (b,) of the canaries of these numbers, (b,)."""
        total = self.dropout(self.embedding(who)).sum(1) + 2.0 * self.head(who)
        for block in self.blocks:
            total = total + block(who)
        return self.level * total


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

    Bits ±½ of such codes are orthogonal in the vector of counts, so that each canary shows in the counts with all of
    its ½√K.
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
    from groupwise.data.torchvision_compat import import_torchvision

    import_torchvision()
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

    Raises:
        UserError: no such model.
    """
    if name not in MODELS:
        raise UserError(f"--model {name} is not one of {', '.join(MODELS)}.")
    torch.manual_seed(seed)
    return MODELS[name](canaries, level if name == "codes" else LOUD * level, dropout)
