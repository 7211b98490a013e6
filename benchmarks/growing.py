"""Two small networks of plain layers, a transformer and a convolutional one, each of whose sizes can grow alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload

VOCABULARY, CLASSES = 512, 10


@dataclass(frozen=True)
class Sizes:
    """What can grow: examples, tokens (or pixels a side), features (or channels), blocks (or convolutions)."""

    batch: int
    length: int
    width: int
    layers: int

    def grown(self, axis: str, doublings: int) -> Sizes:
        """The same with one of them doubled so many times."""
        return replace(self, **{axis: getattr(self, axis) << doublings})


class Block(nn.Module):
    """A transformer block of linear layers and layer norms, which come first."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A language model; the positions come in from outside, one row an example."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        heads = max(1, sizes.width // 32)
        self.blocks = nn.Sequential(*(Block(sizes.width, heads, causal=True) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Two of (B, T) to logits (B, T, VOCABULARY)."""
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(positions))))


Losses = Callable[[nn.Module, slice | list[int]], Tensor]
"""A model and rows of the batch -> their losses, (n,)."""


def transformer(sizes: Sizes, device: str) -> tuple[nn.Module, Losses]:
    """The model, and what gives its losses: next-token, the mean over an example."""
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.length), device=device)
    positions = torch.arange(sizes.length, device=device).repeat(sizes.batch, 1)

    def losses(model: nn.Module, rows: slice | list[int]) -> Tensor:
        logits = model(ids[rows], positions[rows]).float()
        return F.cross_entropy(logits.transpose(1, 2), ids[rows].roll(-1, 1), reduction="none").mean(1)

    return Transformer(sizes).to(device), losses


def conv(sizes: Sizes, device: str) -> tuple[nn.Module, Losses]:
    """3 × 3 convolutions with GroupNorm, all of one width, and what gives the losses."""
    layers: list[nn.Module] = [nn.Conv2d(3, sizes.width, 3, padding=1)]
    for _ in range(sizes.layers):
        layers += [nn.GroupNorm(4, sizes.width), nn.ReLU(), nn.Conv2d(sizes.width, sizes.width, 3, padding=1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes.width, CLASSES)]
    images = torch.randn(sizes.batch, 3, sizes.length, sizes.length, device=device)
    labels = torch.randint(CLASSES, (sizes.batch,), device=device)

    def losses(model: nn.Module, rows: slice | list[int]) -> Tensor:
        return F.cross_entropy(model(images[rows]).float(), labels[rows], reduction="none")

    return nn.Sequential(*layers).to(device), losses


@dataclass(frozen=True)
class Network:
    """A network, the sizes it starts from and the axes it grows along."""

    make: Callable[[Sizes, str], tuple[nn.Module, Losses]]
    start: Sizes
    axes: tuple[str, ...]


NETWORKS = {
    "transformer": Network(
        transformer, Sizes(batch=8, length=32, width=128, layers=2), ("batch", "length", "width", "layers")
    ),
    "conv": Network(conv, Sizes(batch=8, length=16, width=16, layers=4), ("batch", "width", "layers")),
}


def build(network: str, sizes: Sizes, *, device: str = "cpu", dtype: str = "float32") -> Workload:
    """A network of these sizes with weights and data from one seed; bfloat16 runs it in autocast."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, losses = NETWORKS[network].make(sizes, device)

    def of_rows(rows: Sequence[int] | None) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            return losses(model, slice(None) if rows is None else list(rows))

    return Workload(network, model, of_rows, sizes.batch, sizes.layers)
