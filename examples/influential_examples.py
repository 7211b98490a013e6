"""Finds mislabelled, unusual and helpful training examples by their gradients, and draws them. Without privacy.

    python examples/influential_examples.py        CIFAR-10 in $GROUPWISE_DATA, else scikit-learn's digits

A planted check: 2 % of the labels are flipped, and the flipped ones should come first. An example's norm is that of its
loss's gradient; its influence is what a step on it does for the loss of held-out examples (TracIn, Pruthi et al. 2020).
**Neither is private:** they say of single examples what the loss said of them.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from groupwise import gradient_norms, gradient_products
from groupwise.clipping import flat
from groupwise.data.cifar10 import load_cifar10
from groupwise.data.images import average_pool
from groupwise.errors import UserError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load(limit: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images (N, C, H, W) of numbers from 0 to 1, labels (N,) and the classes' names; at most `limit` of them."""
    try:
        data = load_cifar10(Path(os.environ.get("GROUPWISE_DATA", "data")), download=False)
        mixed = torch.randperm(len(data.x_train))[:limit]  # files may hold one class after the other
        return average_pool(data.x_train[mixed], 16) / 255, data.y_train[mixed], CIFAR10
    except UserError:
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images[:limit] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        return x, torch.tensor(labels[:limit]), tuple("0123456789")


def flip(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Labels of which a share is another class, and which they are, (n,) bool."""
    count, classes = round(share * len(labels)), int(labels.max()) + 1
    flipped = torch.zeros(len(labels), dtype=torch.bool)
    flipped[torch.randperm(len(labels))[:count]] = True
    return torch.where(flipped, (labels + torch.randint(1, classes, labels.shape)) % classes, labels), flipped


def network(channels: int, size: int, classes: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, classes)),
    )


def measure(x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor], epochs: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Train on x (n, C, H, W) with labels y (n,); the network, and norms and influences (n,), summed over epochs."""
    torch.manual_seed(0)
    model = network(x.shape[1], x.shape[2], int(y.max()) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    names, parameters = zip(*model.named_parameters(), strict=True)
    batches, norms, influences = torch.arange(len(x)).split(256), torch.zeros(len(x)), torch.zeros(len(x))

    def losses(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(x[rows]), y[rows], reduction="none")

    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            losses(rows).mean().backward()
            optimizer.step()
        if epoch >= epochs // 2:  # a network that knows nothing yet finds everything unusual
            norms += gradient_norms(model, batches, losses, flat(model))["all"]
            better = torch.autograd.grad(F.cross_entropy(model(held_out[0]), held_out[1]), parameters)
            influences += gradient_products(model, batches, losses, dict(zip(names, better, strict=True)))
    return model, norms, influences


def precision(scores: Tensor, flipped: Tensor) -> float:
    """The share of flipped ones among as many examples of the highest scores as there are flipped ones."""
    return float(flipped[scores.argsort(descending=True)[: int(flipped.sum())]].float().mean())


def draw(rows: dict[str, Tensor], x: Tensor, y: Tensor, flipped: Tensor, classes: tuple[str, ...], out: Path) -> None:
    """A row of images for each title, with their labels; flipped ones in red."""
    figure = Figure(figsize=(11, 1.7 * len(rows)), layout="constrained")
    for part, (title, chosen) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows.items(), strict=True):
        part.suptitle(title, fontsize=10)
        for axes, i in zip(part.subplots(1, len(chosen)), chosen.tolist(), strict=True):
            axes.imshow(x[i].permute(1, 2, 0).expand(-1, -1, 3).numpy())
            axes.set_title(classes[int(y[i])], fontsize=8, color="red" if flipped[i] else "black")
            axes.axis("off")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Train, measure, print the precision at the planted flips, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_000, help="of the training set, at most")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("influential_examples.png"))
    given = parser.parse_args()
    torch.manual_seed(0)
    x, right, classes = load(given.examples)
    rest = torch.arange(len(x)) % 5 != 0
    held_out = x[~rest], right[~rest]
    x, right = x[rest], right[rest]
    y, flipped = flip(right, 0.02)
    model, norms, influences = measure(x, y, held_out, given.epochs)
    accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
    print(f"{len(x)} examples, {int(flipped.sum())} of them mislabelled; accuracy {accuracy:.3f} on others.")
    most = {
        "largest norms (red: mislabelled on purpose)": norms.argsort(descending=True)[:10],
        "most harmful: a step on them makes held-out examples worse": influences.argsort()[:10],
        "most helpful: a step on them makes held-out examples better": influences.argsort(descending=True)[:10],
    }
    draw(most, x, y, flipped, classes, given.out)
    print(f"Drawn: {given.out}. These numbers are of single examples, without privacy.")
    told = f"norms {precision(norms, flipped):.3f}, influence {precision(-influences, flipped):.3f}"
    print(f"Precision at as many as are mislabelled: {told}, chance {float(flipped.float().mean()):.3f}")


if __name__ == "__main__":
    main()
