"""Makes the small network that Tramèr and Boneh (2021) train on scattering features: an anchor that fits a CPU."""

from torch import nn

from groupwise.errors import UserError

HIDDEN = 64


def scatter_cnn(num_classes: int, in_channels: int, side: int, norm_groups: int = 27) -> nn.Module:
    """Two convolutions with tanh on normalised features (their table 8; 182,000 weights on CIFAR-10).

    Args:
        num_classes: width of the output.
        in_channels: features of a place, 243 on CIFAR-10; normalised in groups, without weights, example by example.
        side: height and width of the features, 8 on CIFAR-10.
        norm_groups: of that normalisation; a divisor of `in_channels`.

    Raises:
        UserError: groups that do not divide the channels.
    """
    if norm_groups < 1 or in_channels % norm_groups:
        raise UserError(
            f"model.norm_groups={norm_groups} does not divide the {in_channels} scattering channels: take 27 or 9, say."
        )
    return nn.Sequential(
        nn.GroupNorm(norm_groups, in_channels, affine=False),
        nn.Conv2d(in_channels, HIDDEN, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(HIDDEN * (side // 2) ** 2, num_classes),
    )
