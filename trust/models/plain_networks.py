"""Hand-written networks: pairs, graphs, capsules, and one that must be refused."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Architecture, Batch, Size, Subject
from trust.models.plain_layers import FAMILY, net, sequences, vectors


def siamese(size: Size) -> Subject:
    """Two inputs per example, which the loss concatenates into one batch of 2B."""
    model = nn.Sequential(nn.Linear(size.width, 2 * size.width), nn.ReLU(), nn.Linear(2 * size.width, size.width))

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        left, right = model(torch.cat([batch["left"], batch["right"]])).chunk(2)
        return (F.cosine_similarity(left, right) - batch["target"]).square()

    return Subject(model, {"left": vectors(size), "right": vectors(size), "target": torch.rand(size.batch)}, losses)


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
    """Causal dilated convolutions with residuals."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = size.width
        self.convolutions = nn.ModuleList(nn.Conv1d(wide, wide, 2, dilation=2**k) for k in range(size.depth + 1))
        self.mixing = nn.ModuleList(nn.Conv1d(wide, wide, 1) for _ in self.convolutions)
        self.drop, self.head = nn.Dropout(size.dropout), nn.Linear(wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for k, (convolution, mix) in enumerate(zip(self.convolutions, self.mixing, strict=True)):
            x = x + self.drop(mix(convolution(F.pad(x, (2**k, 0))).relu()))
        return self.head(x[:, :, -1])


class Capsules(nn.Module):
    """T capsules that vote for three by a parameter (T, 3, d, 8), with two rounds of routing."""

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


class Autoencoder(nn.Module):
    """A decoder whose weight is the transposed weight of the encoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.encode = nn.Linear(size.width, size.width // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encode(x).tanh(), self.encode.weight.mT)


def autoencoder(size: Size) -> Subject:
    """The squared error of each example."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) - batch["x"]).square().sum(1)

    return Subject(Autoencoder(size), {"x": vectors(size)}, losses)


class Normalised(nn.Module):
    """A network that subtracts a mean over the batch: it must be refused."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(size.width, size.width), nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.below(x)
        return self.head((y - y.mean(0)).tanh())


CUSTOM_NETWORKS = (
    net("Graph with fixed edges", Graph, sequences),
    net("TCN", Temporal, sequences),
    net("Capsules", Capsules, sequences),
    Architecture("Siamese, two inputs concatenated", FAMILY, siamese),
    Architecture("Autoencoder, weight tied and transposed", FAMILY, autoencoder),
    net("A mean over the batch", Normalised, vectors, mixes=True),
)
