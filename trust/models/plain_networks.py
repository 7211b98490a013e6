"""Networks that people write themselves: pixels, sets, pairs, tables, experts, and some that must be refused."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Batch, Size, Subject, classified
from trust.models.plain_layers import images, net, of, sequences, vectors


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
        return self.end(torch.cat([self.second(up).relu(), top], 1))


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
        return self.head(y.view_as(x).mean(1))


class SoftExperts(Experts):
    """Every expert sees every token; a gate weighs their outputs."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x).relu() for expert in self.experts], -1)
        return self.head((outputs * self.gate(x).softmax(-1).unsqueeze(2)).sum(-1).mean(1))


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
        return self.head(self.inner(x.reshape(-1, x.shape[2])).view_as(x).sum(1))


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


def video(size: Size) -> nn.Module:
    """Two 3d convolutions."""
    wide = size.width // 2
    first = (nn.Conv3d(3, wide, 3, padding=1), nn.GroupNorm(2, wide), nn.ReLU())
    return nn.Sequential(
        *first, nn.Conv3d(wide, wide, 3, stride=2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(wide, 3)
    )


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
        return self.head(x)


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
        return self.head((y - y.mean(0)).tanh())


def contrastive(size: Size) -> Subject:
    """SimCLR: every example against all others of the batch."""
    model = nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU(), nn.Linear(size.width, size.width))

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = F.normalize(model(batch["left"])) @ F.normalize(model(batch["right"])).mT
        return classified(4 * logits, torch.arange(len(logits)))

    return Subject(model, {"left": vectors(size), "right": vectors(size)}, losses)


NETWORKS_OF_ONES_OWN = (
    of("UNet", unet),
    net("Experts, top 1", Experts, sequences),
    net("Experts, all weighed", SoftExperts, sequences),
    of("Siamese, two inputs concatenated", siamese),
    net("Deep sets, members folded into the batch", DeepSets, sequences),
    of("DLRM", dlrm),
    net("Conv3d", video, lambda s: s.vectors(3, 5, 8, 8)),
    net("Neural ODE, one block 8 times", Ode, vectors),
    of("Autoencoder, weight tied and transposed", autoencoder),
    net("A mean over the batch", Normalised, vectors, mixes=True),
    of("SimCLR", contrastive, mixes=True),
)
