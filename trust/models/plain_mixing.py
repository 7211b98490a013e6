"""Networks that mix positions without attention: over time, over a graph, by an MLP, by a transform."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Size
from trust.models.plain_layers import net, sequences, vectors


class Graph(nn.Module):
    """Two graph convolutions over one fixed graph, whose nodes are the second axis."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        edges = (torch.rand(size.tokens, size.tokens) < 0.4).float() + torch.eye(size.tokens)
        self.register_buffer("edges", edges / edges.sum(1, keepdim=True))
        self.first, self.second = nn.Linear(size.width, size.width), nn.Linear(size.width, size.width)
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("nm,bmd->bnd", self.edges, self.first(x)).relu()
        x = torch.einsum("nm,bmd->bnd", self.edges, self.second(x)).relu()
        return self.head(x.mean(1))


class Temporal(nn.Module):
    """Causal dilated convolutions with residuals; `gated`: as WaveNet's, with skips."""

    def __init__(self, size: Size, gated: bool) -> None:
        super().__init__()
        wide = size.width
        self.convolutions = nn.ModuleList(
            nn.Conv1d(wide, (1 + gated) * wide, 2, dilation=2**k) for k in range(size.depth + 1)
        )
        self.mixing = nn.ModuleList(nn.Conv1d(wide, 2 * wide if gated else wide, 1) for _ in self.convolutions)
        self.drop, self.head, self.gated = nn.Dropout(size.dropout), nn.Linear(wide, 3), gated

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        skips = torch.zeros_like(x)
        for k, (convolution, mix) in enumerate(zip(self.convolutions, self.mixing, strict=True)):
            y = convolution(F.pad(x, (2**k, 0)))
            if self.gated:
                left, right = y.chunk(2, 1)
                more, skip = mix(left.tanh() * right.sigmoid()).chunk(2, 1)
                x, skips = x + more, skips + skip
            else:
                x = x + self.drop(mix(y.relu()))
        return self.head((skips if self.gated else x)[:, :, -1])


class Highway(nn.Module):
    """y·t + x·(1 − t), three times."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.changes = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(3))
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for change, gate in zip(self.changes, self.gates, strict=True):
            t = gate(x).sigmoid()
            x = change(x).tanh() * t + x * (1 - t)
        return self.head(x)


class Mixer(nn.Module):
    """MLP-Mixer: an MLP over positions, on transposed features, and one over features."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.places = nn.Sequential(
            nn.Linear(size.tokens, 2 * size.tokens), nn.GELU(), nn.Linear(2 * size.tokens, size.tokens)
        )
        self.features = nn.Sequential(
            nn.Linear(size.width, 2 * size.width), nn.GELU(), nn.Linear(2 * size.width, size.width)
        )
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.first(x).mT).mT
        x = x + self.features(self.second(x))
        return self.head(x.mean(1))


class GatedMLP(nn.Module):
    """gMLP: half of the features, mixed over positions by a Conv1d of kernel 1, gate the other half."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(size.width), nn.Linear(size.width, 2 * size.width)
        self.gate_norm, self.places = nn.LayerNorm(size.width), nn.Conv1d(size.tokens, size.tokens, 1)
        self.down, self.head = nn.Linear(size.width, size.width), nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(self.norm(x))).chunk(2, 2)
        x = x + self.down(u * self.places(self.gate_norm(v)))
        return self.head(x.mean(1))


class Fourier(nn.Module):
    """FNet: the Fourier transform over positions and features in place of attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.up, self.down = nn.Linear(size.width, 2 * size.width), nn.Linear(2 * size.width, size.width)
        self.below, self.head = nn.Linear(size.width, size.width), nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        x = self.first(x + torch.fft.fft2(x).real / math.sqrt(x.shape[1] * x.shape[2]))
        x = self.second(x + self.down(F.gelu(self.up(x))))
        return self.head(x.mean(1))


class Capsules(nn.Module):
    """Votes of T capsules for three, by a weight (T, 3, d, 8) of its own, and two rounds of routing."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.below = nn.Linear(size.width, size.width)
        self.votes = nn.Parameter(torch.randn(size.tokens, 3, size.width, 8) / math.sqrt(size.width))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("btd,tkde->btke", self.below(x), self.votes)
        agreement = votes.new_zeros(votes.shape[:3])
        for _ in range(2):
            total = (agreement.softmax(2).unsqueeze(3) * votes).sum(1)
            squares = total.square().sum(2, keepdim=True)
            out = total * squares.sqrt() / (1 + squares)
            agreement = agreement + (votes * out.unsqueeze(1)).sum(3)
        return 4 * out.norm(dim=2)


MIXING = (
    net("Graph with fixed edges", Graph, sequences),
    net("TCN", lambda size: Temporal(size, gated=False), sequences),
    net("WaveNet", lambda size: Temporal(size, gated=True), sequences),
    net("Highway", Highway, vectors),
    net("MLP-Mixer", Mixer, sequences),
    net("gMLP", GatedMLP, sequences),
    net("FNet", Fourier, sequences),
    net("Capsules", Capsules, sequences),
)
