"""How many groups a GroupNorm gets, and the one place where a normalisation layer is made."""

from torch import nn

NORMS = ("group", "batch")


def group_count(channels: int, norm_groups: int, *, stem: bool = False) -> int:
    """Choose the groups of a GroupNorm: `norm_groups`, but never so many that a group is a single channel.

    A group of one channel subtracts each channel's own mean. Before a global average pooling that leaves
    nothing but the bias: the network is constant. So the count is the largest divisor of `channels` that is
    at most min(norm_groups, channels // 2).

    Args:
        channels: channels of the layer's input.
        norm_groups: the number of groups asked for (16 in De et al.).
        stem: the input is the 16-channel first convolution, which De et al. do normalise in 16 groups of one
            channel; there the bound is min(norm_groups, channels), so the published network stays itself.

    Returns:
        A divisor of `channels`, at least 1.
    """
    bound = max(1, min(norm_groups, channels if stem else channels // 2))
    return max(count for count in range(1, bound + 1) if channels % count == 0)


def make_norm(norm: str, channels: int, norm_groups: int, *, stem: bool = False) -> nn.Module:
    """Make the normalisation of (B, channels, H, W): "group" for private training, "batch" for the baseline.

    "batch" mixes the examples of a batch: it is the non-private baseline, and the clipping engine refuses it.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(group_count(channels, norm_groups, stem=stem), channels)
