"""The opt-in secure noise: its keystream, its lattice, and the attack on low bits that the lattice prevents."""

import sys

import numpy as np
import pytest
import torch
from scipy import stats

from groupwise.errors import UserError
from groupwise.privacy.noise import NoiseSource
from groupwise.privacy.secure_noise import Keystream, lattice_spacing

SOURCE = NoiseSource.from_seed(7, secure=True)
DTYPES = [torch.float32, torch.float64]


def draw(size=20_000, std=1.0, step=0, stream=0, source=SOURCE, dtype=torch.float64) -> torch.Tensor:
    return source.add_gaussian_(torch.zeros(size, dtype=dtype), std, step, stream)


def test_the_keystream_is_chacha20_of_rfc_8439():
    # RFC 8439, appendix A.1, test vector 1: key, counter and nonce of zeros.
    words = Keystream(bytes(32)).words(8)
    assert words.tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )


def test_extreme_words_give_finite_draws(monkeypatch):
    words = np.array([0, 1, 2**64 - 1, 2**64 - 2], dtype=np.uint64)
    monkeypatch.setattr(Keystream, "words", lambda self, count: words)
    draws = Keystream(bytes(32)).normals(4)
    assert draws == pytest.approx([stats.norm.ppf(2.0**-65), -stats.norm.ppf(2.0**-65), 0, 0], abs=1e-9)


@pytest.mark.parametrize("std", [1e-6, 0.37, 1.0, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_release_is_the_rounded_sum_plus_a_multiple_of_the_spacing(std, dtype):
    spacing = lattice_spacing(std)
    assert 2.0**-41 < spacing / std <= 2.0**-40
    sums = torch.randn(5000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    noise = draw(5000, std)  # of zeros, exact in float64
    exact = (sums.double() / spacing).round() * spacing + noise
    assert torch.equal(SOURCE.add_gaussian_(sums.clone(), std, 0, 0), exact.to(dtype))
    assert bool(((noise / spacing) % 1 == 0).all())


def fine_bits(value: float, source: NoiseSource, dtype: torch.dtype) -> float:
    """The share of outputs with bits finer than those of 1, when each sum is ``value`` and the noise has std 1."""
    digits = 53 if dtype == torch.float64 else 24
    outputs = source.add_gaussian_(torch.full((20_000,), value, dtype=dtype), 1.0, 0, 0).double()
    return float(((outputs * 2.0**digits) % 1 != 0).double().mean())


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_bits_tell_sums_apart_by_default_and_not_when_secure(dtype):
    usual = NoiseSource.from_seed(7)
    assert fine_bits(0.0, usual, dtype) > 0.2  # these outputs prove that the sum was not 1
    assert fine_bits(1.0, usual, dtype) == 0.0
    secure = [fine_bits(value, SOURCE, dtype) for value in (0.0, 1.0)]
    # On the float64 lattice no output has such bits; after rounding to float32 small outputs have them for both sums.
    assert secure == [0.0, 0.0] if dtype == torch.float64 else min(secure) > 0.1


def test_a_missing_package_is_refused_with_advice_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(UserError, match="pip install cryptography"):
        Keystream(bytes(32))
