"""Very small networks with one or two layers of torch.nn each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from trust.models.architecture import Architecture, Batch, Size, Subject, decisions, in_eval

FAMILY = "torch.nn"


def net(
    name: str,
    model: Callable[[Size], nn.Module],
    inputs: Callable[[Size], Tensor | Batch],
    losses: Callable[[nn.Module, Batch], Tensor] = decisions,
    mixes: bool = False,
) -> Architecture:
    """One architecture of the table: a model and its inputs, with cross-entropy unless `losses` is given."""

    def make(size: Size) -> Subject:
        network, given = model(size), inputs(size)
        batch = given if isinstance(given, dict) else {"x": given}
        return Subject(network, batch | ({"labels": size.labels()} if losses is decisions else {}), losses)

    return Architecture(name, FAMILY, make, mixes)


def words(size: Size) -> Batch:
    """Tokens and their mask."""
    return {"ids": size.ids(), "mask": size.mask}


def vectors(size: Size) -> Tensor:
    """Random vectors, (B, width)."""
    return size.vectors(size.width)


def sequences(size: Size) -> Tensor:
    """Random sequences, (B, T, width)."""
    return size.vectors(size.tokens, size.width)


def images(size: Size) -> Tensor:
    """Random images, (B, 3, image / 2, image / 2)."""
    return size.vectors(3, size.image // 2, size.image // 2)


def with_dropout(size: Size, *layers: nn.Module) -> nn.Sequential:
    """The layers, and dropout before the last."""
    return nn.Sequential(*layers[:-1], nn.Dropout(size.dropout), layers[-1])


def mlp(size: Size) -> nn.Module:
    """Three linear layers and LayerNorm."""
    wide = 4 * size.width
    return with_dropout(
        size,
        nn.Linear(size.width, wide),
        nn.LayerNorm(wide),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.GELU(),
        nn.Linear(wide, 3),
    )


def cnn(size: Size, *more: nn.Module) -> nn.Module:
    """Two convolutions, `more` in between, and a mean over pixels."""
    wide = size.width
    return with_dropout(
        size,
        nn.Conv2d(3, wide, 3, padding=1),
        *more,
        nn.ReLU(),
        nn.Conv2d(wide, wide, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(wide, 3),
    )


def between(size: Size, layer: nn.Module) -> nn.Module:
    """A layer (…, width) -> (…, width) between two linear ones."""
    return with_dropout(size, nn.Linear(size.width, size.width), layer, nn.Tanh(), nn.Linear(size.width, 3))


class Pool(nn.Module):
    """Layers on a sequence, and the mean over its positions before the head."""

    def __init__(self, size: Size, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.drop = nn.Sequential(*layers), nn.Dropout(size.dropout)
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(x).mean(1)))


class Scale(nn.Module):
    """One parameter per feature, or one for all: shape (width,) or ()."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def fixed_spectral_norm(size: Size) -> nn.Module:
    """A linear layer whose spectral norm stays in eval mode, so that forward passes do not change its vectors."""
    layer = parametrizations.spectral_norm(nn.Linear(size.width, size.width))
    in_eval(layer.parametrizations["weight"][0])  # type: ignore[index, arg-type]
    return layer


class Bilinear(nn.Module):
    """nn.Bilinear on the two halves of the features."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.both = nn.Linear(size.width, size.width), nn.Bilinear(size.width // 2, size.width // 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(*self.first(x).tanh().chunk(2, 1))


class TextCNN(nn.Module):
    """An embedding whose output is transposed for convolutions over time."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(size.width, size.width, k, padding=k // 2) for k in (3, 5))
        self.head = nn.Linear(2 * size.width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        return self.head(torch.cat([layer(x).relu().amax(2) for layer in self.convolutions], 1))


LAYERS = (
    net("MLP", mlp, vectors),
    net("MLP over positions", lambda s: Pool(s, mlp(s), nn.Linear(3, s.width)), sequences),
    net("CNN", cnn, images),
    net("CNN, GroupNorm", lambda s: cnn(s, nn.GroupNorm(4, s.width)), images),
    net("CNN, InstanceNorm", lambda s: cnn(s, nn.InstanceNorm2d(s.width, affine=True)), images),
    net("CNN, PReLU", lambda s: cnn(s, nn.PReLU(s.width)), images),
    net(
        "CNN, channels last",
        lambda s: cnn(s).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        images,
    ),
    net("CNN, ConvTranspose2d", lambda s: cnn(s, nn.ConvTranspose2d(s.width, s.width, 2, 2)), images),
    net(
        "CNN, dilated, padded by reflection",
        lambda s: cnn(s, nn.Conv2d(s.width, s.width, 3, dilation=2, padding=2, padding_mode="reflect")),
        images,
    ),
    net("PReLU", lambda s: between(s, nn.PReLU()), vectors),
    net("RMSNorm", lambda s: between(s, nn.RMSNorm(s.width)), vectors),
    net("RMSNorm over positions", lambda s: Pool(s, nn.Linear(s.width, s.width), nn.RMSNorm(s.width)), sequences),
    net("Bilinear", Bilinear, vectors),
    net("Weight norm", lambda s: between(s, parametrizations.weight_norm(nn.Linear(s.width, s.width))), vectors),
    net("Spectral norm", lambda s: between(s, fixed_spectral_norm(s)), vectors),
    net("Orthogonal", lambda s: between(s, parametrizations.orthogonal(nn.Linear(s.width, s.width))), vectors),
    net(
        "Weight norm, convolution",
        lambda s: cnn(s, parametrizations.weight_norm(nn.Conv2d(s.width, s.width, 3, padding=1))),
        images,
    ),
    net("Temperature (0-dim parameter)", lambda s: between(s, Scale()), vectors),
    net("LayerScale", lambda s: Pool(s, nn.Linear(s.width, s.width), Scale(s.width)), sequences),
    net("Embedding, transposed, Conv1d", TextCNN, Size.ids),
)
