"""From bytes to what a network sees, by public constants."""

import torch
from torch import Tensor

from groupwise.errors import UserError

ChannelStatistics = tuple[tuple[float, ...], tuple[float, ...]]

# CIFAR-10: the published values, used by jax_privacy's experiments. Digits: centre and half of the range.
_STATISTICS: dict[str, ChannelStatistics] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.5,), (0.5,)),
}


def channel_statistics(name: str) -> ChannelStatistics:
    """Return a data set's public (mean, std) for each channel, of intensities in [0, 1].

    They are constants of this file, never computed from the data that is loaded. CIFAR-10's are the
    published mean and standard deviation of its training images: computed once by others from those very
    images, without noise. De et al. (2022) use them, and like them we treat them as public; no epsilon
    covers them. Where that will not do, 0.5 for every mean and deviation depends on nothing, and so the
    digits are centred.

    Raises:
        UserError: the name is not a data set's.
    """
    if name not in _STATISTICS:
        raise UserError(f"data set {name!r} has no channel statistics; choose one of {', '.join(_STATISTICS)}.")
    return _STATISTICS[name]


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Scale images (N, C, H, W) of uint8 to float32: (x/255 - mean)/std, channel by channel.

    Raises:
        UserError: the images are not uint8, or mean and std do not have one value for each channel.
    """
    if images.dtype != torch.uint8:
        raise UserError(f"images of {images.dtype} were given to normalize, which takes the stored uint8.")
    if images.dim() != 4 or len(mean) != images.shape[1] or len(std) != images.shape[1]:
        raise UserError(
            f"images of shape {tuple(images.shape)} were given with {len(mean)} means and {len(std)} "
            "deviations; normalize takes (N, C, H, W) and one of each for every channel."
        )
    shape = (1, -1, 1, 1)
    centre = torch.tensor(mean, device=images.device).view(shape) * 255
    spread = torch.tensor(std, device=images.device).view(shape) * 255
    return (images - centre) / spread
