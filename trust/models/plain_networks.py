"""Networks that people write themselves, for images, sound, sets, tables and graphs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Batch, Size, Subject, classified
from trust.models.plain_attention import simple
from trust.models.plain_layers import images, losses_of_x, net, of, vectors


class UNet(nn.Module):
    """Down twice, up twice by ConvTranspose2d, with concatenated skips; one logit a pixel."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = size.width // 2
        self.start, self.norm = nn.Conv2d(3, wide, 3, padding=1), nn.GroupNorm(2, wide)
        self.down, self.bottom = nn.Conv2d(wide, wide, 2, 2), nn.Conv2d(wide, wide, 2, 2)
        self.first, self.second = nn.ConvTranspose2d(wide, wide, 2, 2), nn.ConvTranspose2d(2 * wide, wide, 2, 2)
        self.end, self.drop = nn.Conv2d(2 * wide, 1, 1), nn.Dropout2d(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        top = self.norm(self.start(x)).relu()
        middle = self.down(top).relu()
        up = torch.cat([self.first(self.drop(self.bottom(middle).relu())), middle], 1)
        pixels: Tensor = self.end(torch.cat([self.second(up).relu(), top], 1))
        return pixels


def unet(size: Size) -> Subject:
    """A mean loss over each image's pixels."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        wrong = F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"], reduction="none")
        return wrong.flatten(1).mean(1)

    x = images(size)
    return Subject(UNet(size), {"x": x, "y": (x.mean(1, keepdim=True) > 0).float()}, losses)


class Experts(nn.Module):
    """Each token goes to the one expert that its gate likes most."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, 3)
        self.experts = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(3))
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(1).max(1)
        y = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == k)
            y = y.index_add(0, where, expert(rows[where]) * weight[where, None])
        logits: Tensor = self.head(y.view_as(x).mean(1))
        return logits


class SoftExperts(nn.Module):
    """Every expert sees every token; a gate weighs their outputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, 3)
        self.experts = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(3))
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x).relu() for expert in self.experts], -1)
        logits: Tensor = self.head((outputs * self.gate(x).softmax(-1).unsqueeze(2)).sum(-1).mean(1))
        return logits


def siamese(size: Size) -> Subject:
    """Two inputs an example, concatenated into one batch of 2B inside the model."""
    model = nn.Sequential(nn.Linear(size.width, 2 * size.width), nn.ReLU(), nn.Linear(2 * size.width, size.width))

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        left, right = model(torch.cat([batch["left"], batch["right"]])).chunk(2)
        return (F.cosine_similarity(left, right) - batch["target"]).square()

    return Subject(model, {"left": vectors(size), "right": vectors(size), "target": torch.rand(size.batch)}, losses)


class DeepSets(nn.Module):
    """The members of all sets are rows of one batch for `inner`; sums of them go on."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU(), nn.Linear(size.width, size.width))
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(x.reshape(-1, x.shape[2])).view_as(x).sum(1))
        return logits


class DLRM(nn.Module):
    """Numbers by an MLP, categories by EmbeddingBag, all their inner products, an MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(4, size.width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(size.vocabulary, size.width, mode="sum") for _ in range(2))
        self.above = nn.Sequential(nn.Linear(size.width + 9, size.width), nn.ReLU(), nn.Linear(size.width, 1))

    def forward(self, numbers: Tensor, first: Tensor, second: Tensor) -> Tensor:
        below = self.below(numbers)
        each = torch.stack([below, self.bags[0](first), self.bags[1](second)], 1)
        logit: Tensor = self.above(torch.cat([below, (each @ each.mT).flatten(1)], 1))
        return logit.squeeze(1)


def dlrm(size: Size) -> Subject:
    """Clicks from four numbers and two bags of categories."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        click = model(batch["numbers"], batch["first"], batch["second"])
        return F.binary_cross_entropy_with_logits(click, batch["click"], reduction="none")

    batch = {"numbers": size.vectors(4), "first": size.ids(), "second": size.ids()}
    return Subject(DLRM(size), {**batch, "click": torch.randint(2, (size.batch,)).float()}, losses)


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
        logits: Tensor = self.head(x.mean(1))
        return logits


def video(size: Size) -> Subject:
    """Two 3d convolutions."""
    wide = size.width // 2
    model = nn.Sequential(
        nn.Conv3d(3, wide, 3, padding=1),
        nn.GroupNorm(2, wide),
        nn.ReLU(),
        nn.Conv3d(wide, wide, 3, stride=2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(wide, 3),
    )
    return Subject(model, {"x": size.vectors(3, 5, 8, 8), "labels": size.labels()}, losses_of_x)


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
        for convolution, mix in zip(self.convolutions, self.mixing, strict=True):
            y = convolution(F.pad(x, (convolution.dilation[0], 0)))
            if self.gated:
                left, right = y.chunk(2, 1)
                more, skip = mix(left.tanh() * right.sigmoid()).chunk(2, 1)
                x, skips = x + more, skips + skip
            else:
                x = x + self.drop(mix(y.relu()))
        logits: Tensor = self.head((skips if self.gated else x)[:, :, -1])
        return logits


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
        logits: Tensor = self.head(x)
        return logits


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
        logits: Tensor = self.head(x.mean(1))
        return logits


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
        logits: Tensor = self.head(x.mean(1))
        return logits


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
        logits: Tensor = self.head(x.mean(1))
        return logits


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


class Ode(nn.Module):
    """One block used for eight Euler steps, and the time as a feature."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size.width + 1, size.width), nn.Linear(size.width, size.width)
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(8):
            time = x.new_full((len(x), 1), step / 8)
            x = x + self.second(self.first(torch.cat([x, time], 1)).tanh()) / 8
        logits: Tensor = self.head(x)
        return logits


class Autoencoder(nn.Module):
    """A decoder whose weight is the encoder's, transposed."""

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
    """A linear network, and a mean over the batch taken off its output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(size.width, size.width), nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.below(x)
        logits: Tensor = self.head((y - y.mean(0)).tanh())
        return logits


def contrastive(size: Size) -> Subject:
    """SimCLR: every example against all others of the batch."""
    model = nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU(), nn.Linear(size.width, size.width))

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = F.normalize(model(batch["left"])) @ F.normalize(model(batch["right"])).mT
        return classified(4 * logits, torch.arange(len(logits)))

    return Subject(model, {"left": vectors(size), "right": vectors(size)}, losses)


NETWORKS_OF_ONES_OWN = (
    of("UNet", unet),
    of("Experts, top 1", simple(Experts)),
    of("Experts, all weighed", simple(SoftExperts)),
    of("Siamese, two inputs concatenated", siamese),
    of("Deep sets, members folded into the batch", simple(DeepSets)),
    of("DLRM", dlrm),
    of("Graph with fixed edges", simple(Graph)),
    of("Conv3d", video),
    of("TCN", simple(lambda size: Temporal(size, gated=False))),
    of("WaveNet", simple(lambda size: Temporal(size, gated=True))),
    net("Highway", Highway, vectors),
    of("MLP-Mixer", simple(Mixer)),
    of("gMLP", simple(GatedMLP)),
    of("FNet", simple(Fourier)),
    of("Capsules", simple(Capsules)),
    net("Neural ODE, one block 8 times", Ode, vectors),
    of("Autoencoder, weight tied and transposed", autoencoder),
    of(
        "A mean over the batch",
        lambda s: Subject(Normalised(s), {"x": vectors(s), "labels": s.labels()}, losses_of_x),
        mixes=True,
    ),
    of("SimCLR", contrastive, mixes=True),
)
