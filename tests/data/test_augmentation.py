"""Views of images: mirrored and shifted, each image's own."""

import pytest
import torch

from groupwise.data.images import augment

IMAGES = torch.arange(2 * 1 * 4 * 5, dtype=torch.uint8).reshape(2, 1, 4, 5)


def by_hand(image, down, right, mirrored):
    """Pad by reflection, cut, mirror, with torch's own functions."""
    most = 3
    padded = torch.nn.functional.pad(image[None].float(), [most] * 4, mode="reflect")[0].to(image.dtype)
    cut = padded[:, most + down : most + down + image.shape[1], most + right : most + right + image.shape[2]]
    return cut.flip(2) if mirrored else cut


@pytest.mark.parametrize(("flip", "crop"), [(True, 0), (False, 3), (True, 2)])
def test_every_view_is_a_mirrored_cut_of_its_own_image(flip, crop):
    torch.manual_seed(0)
    views = augment(IMAGES, 60, flip, crop)
    assert views.shape == (2, 60, 1, 4, 5) and views.dtype == torch.uint8
    shifts = range(-crop, crop + 1)
    for image, some in zip(IMAGES, views, strict=True):
        possible = [by_hand(image, y, x, m) for y in shifts for x in shifts for m in {False, flip}]
        seen = {next(at for at, one in enumerate(possible) if torch.equal(one, view)) for view in some}
        assert len(seen) > min(len(possible) // 2, 20)


def test_nothing_is_drawn_where_nothing_is_asked():
    state = torch.get_rng_state()
    assert torch.equal(augment(IMAGES, 2, flip=False, crop=0)[:, 1], IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
