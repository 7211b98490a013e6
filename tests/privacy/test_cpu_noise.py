"""Normal draws on a CPU: their distribution and tails, and that no draw is 0 or more frequent than others."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from groupwise.privacy import NoiseSource
from groupwise.privacy.cpu_noise import CHUNK, COMPILED, box_muller, box_muller_compiled, normals

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
COMPILE = pytest.param(
    box_muller_compiled,
    id="compiled",
    marks=pytest.mark.skipif(COMPILED is None, reason="installed without a compiler"),
)
by_either = pytest.mark.parametrize("pairs_of", [pytest.param(box_muller, id="numpy"), COMPILE])
Pairs = Callable[[np.ndarray, np.ndarray], np.ndarray]
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
RADII = np.array([0, 1, -1, LEAST, LEAST + 1, MOST, MOST - 1, 2**62, -(2**62), 3**39])
ANGLES = np.array([0, 1, -1, -(2**31), 2**31 - 1, 2**30, 2**30 - 1, -(2**30), 2**29, -(2**29)], dtype=np.int32)


def draw(size: int = 200_000, std: float = 1.0, step: int = 0) -> np.ndarray:
    return SOURCE.add_gaussian_(torch.zeros(size), std, step, 0).numpy()


@pytest.mark.parametrize("divisor", [1.0, 512.0])
def test_compiled_noise_matches_numpys_up_to_rounding(divisor: float) -> None:
    sums = torch.randn(CHUNK + 1001, generator=torch.Generator().manual_seed(0))
    noised = [sums.clone(), sums.clone()]
    for secret, each in zip((True, False), noised, strict=True):
        NoiseSource(KEY, secret).add_gaussians_([each[:700], each[700:]], [2.0, 30.0], 4, divisor)
    assert (noised[0] - noised[1]).abs().max() < 2e-5 / divisor  # of values up to 150
    assert not torch.equal(noised[0], sums)


@by_either
def test_pairs_match_a_computation_in_float64(pairs_of: Pairs) -> None:
    random = np.random.default_rng(5)
    radii = random.integers(LEAST, MOST, 50_000) >> random.integers(0, 63, 50_000)  # small words, too
    angles = random.integers(-(2**31), 2**31, 50_000).astype(np.int32)
    radius = np.sqrt(-2.0 * np.log(np.minimum((np.abs(radii.astype(float)) + 0.5) * 2.0**-63, 1 - 2.0**-53)))
    angle = ((angles & (2**30 - 1)) + 0.5) * (np.pi * 2.0**-31)
    signs = np.where([angles < 0, angles & 2**30 != 0], -1.0, 1.0)
    truth = radius * np.stack([np.sin(angle), np.cos(angle)]) * signs
    assert np.abs(pairs_of(radii, angles).reshape(2, -1) / truth - 1.0).max() < 1e-6


@by_either
def test_no_word_gives_a_draw_of_zero_or_infinity(pairs_of: Pairs) -> None:
    """Noise of 0 would release a sum as it is. It happened to 3 to 12 of 125 million sums in every step."""
    radii, angles = (words.ravel() for words in np.meshgrid(RADII, ANGLES))
    with np.errstate(all="raise"):
        drawn = pairs_of(radii, angles.astype(np.int32))
    assert np.isfinite(drawn).all() and drawn.all()


@by_either
def test_a_radius_ends_at_nine_standard_deviations(pairs_of: Pairs) -> None:
    _, drawn = pairs_of(np.array([0, 1]), np.zeros(2, np.int32)).reshape(2, 2)  # the angle's cosine is 1
    assert drawn.tolist() == pytest.approx([math.sqrt(-2 * math.log(numerator * 2.0**-64)) for numerator in (1, 3)])


@by_either
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("of", ["radius", "angle"])
def test_small_draws_keep_their_digits(axis: int, of: str, pairs_of: Pairs) -> None:
    """2000 adjacent words give different draws near 0, most of which float32 numbers near 1 could not tell apart."""
    near = np.arange(2000) if axis == 0 else 2**30 - 1 - np.arange(2000)
    one = np.full(2000, 2**62)
    radii, angles = (MOST - 2**11 * np.arange(2000), near * 0 + 2**29) if of == "radius" else (one, near)
    drawn = pairs_of(radii, angles.astype(np.int32)).reshape(2, -1)[axis]
    assert len(np.unique(drawn)) > 1000 and np.abs(drawn).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_no_value_of_a_billion_draws_has_a_point_mass(compiled: bool) -> None:
    """Near 0 a normal's density is 0.4: within 1e-6 are 798 of 10⁹, and no two of them are equal but by chance.

    Tails: 10⁹ draws pass 5 standard deviations 573 times, each within five standard errors.
    """
    small, beyond = [], 0
    for chunk in range(10**9 // CHUNK):
        drawn = normals(bytes(32), chunk, CHUNK, torch.float32, compiled).numpy()
        small.append(drawn[np.abs(drawn) < 1e-6])
        beyond += int((np.abs(drawn) > 5.0).sum())
    near = np.concatenate(small)
    assert len(near) == pytest.approx(798, abs=5 * math.sqrt(798))
    assert len(np.unique(near)) == len(near) and near.all()
    assert beyond == pytest.approx(573, abs=5 * math.sqrt(573))


def test_draws_match_known_answers() -> None:
    assert draw(5, step=3).tolist() == pytest.approx(FEW, rel=1e-5)
    assert draw(CHUNK + 7)[CHUNK:][:2].tolist() == pytest.approx(SECOND_CHUNK, rel=1e-5)


FEW = [-0.4726696312427521, -0.7277541756629944, -1.4659297466278076, -0.9010789394378662, 0.9322591423988342]
SECOND_CHUNK = [-0.3285578191280365, -0.24111196398735046]
