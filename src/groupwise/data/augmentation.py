"""Draws flipped and shifted views of images, each image's own."""

import torch
from torch import Tensor


def augment(images: Tensor, views: int, flip: bool, crop: int) -> Tensor:
    """Views of each image: shifted by up to `crop` pixels each way, as if reflected at the edges, and mirrored or not.

    The default generator of torch draws, which the run's secret key seeds: no other image has a part in a view.

    Args:
        images: (n, C, H, W), of any type; W and H above `crop`.
        views: K, how many of each.
        flip: mirror each view, left to right, with probability a half.
        crop: the largest shift, in pixels.

    Returns:
        (n, K, C, H, W).
    """
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device).expand(count, views, height)
    columns = torch.arange(width, device=device).expand(count, views, width)
    if crop:
        shift = torch.randint(-crop, crop + 1, (count, views, 2), device=device)
        rows = _reflected(rows + shift[..., :1], height)
        columns = _reflected(columns + shift[..., 1:], width)
    if flip:
        mirrored = torch.rand((count, views, 1), device=device) < 0.5
        columns = torch.where(mirrored, columns.flip(2), columns)
    which = torch.arange(count, device=device)[:, None, None, None, None]
    channel = torch.arange(channels, device=device)[None, None, :, None, None]
    return images[which, channel, rows[:, :, None, :, None], columns[:, :, None, None, :]]


def _reflected(places: Tensor, size: int) -> Tensor:
    """Indices beyond the edges, reflected there; the edge itself is not repeated."""
    places = places.abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)
