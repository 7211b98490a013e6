"""Noise from Philox: known answers, and the same draws for every memory layout, chunk size and compiler."""

import pytest
import torch
from torch import Tensor

from groupwise.privacy import NoiseSource, philox_noise
from groupwise.privacy.philox_noise import WORD, draws, kernel_on, noise_, philox

CPU = torch.device("cpu")
SOURCE = NoiseSource(bytes(range(32)), generator="Philox")
KNOWN = [  # Random123's kat_vectors, philox4x32 10: counter, key, answer
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def draw(*size: int, step: int = 0, stream: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    return SOURCE.add_gaussian_(torch.zeros(size, dtype=dtype), std, step, stream)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_its_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = tuple(torch.tensor([word, 5]) for word in counter)
    found = philox(words, (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [int(word[0]) for word in found] == answer


@pytest.mark.parametrize("place", range(16))
def test_every_secret_byte_changes_all_draws(place: int) -> None:
    def noise(digest: bytes) -> Tensor:
        sums = torch.zeros(100)
        philox_noise.add_(digest, [(sums, 1.0, 0)], 1.0)
        return sums

    digest = bytearray(32)
    first = noise(bytes(digest))
    digest[place] ^= 0x80
    assert not bool((noise(bytes(digest)) == first).any())


@pytest.mark.parametrize(("words", "least", "most"), [((0, 0), 9.4, 9.5), ((WORD, WORD), 1e-9, 1e-7)])
def test_a_radius_is_never_0_and_uses_more_than_32_bits(monkeypatch, words, least, most) -> None:
    """With 32 bits the largest radius would be 6.8."""
    first, second = (torch.tensor([word]) for word in words)
    monkeypatch.setattr(philox_noise, "philox", lambda counter, key: (first, second, first * 0, first * 0))
    assert least < float(draws(torch.tensor([0]), torch.zeros(4, dtype=torch.int64))) < most


@pytest.mark.parametrize(
    "layout", [lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.mT.contiguous().mT, lambda t: t]
)
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_neither_layout_nor_chunks_change_a_draw(monkeypatch: pytest.MonkeyPatch, layout, chunk: int) -> None:
    expected = draw(5, 3, 3, 7)
    monkeypatch.setitem(philox_noise.CHUNKS, "cpu", chunk)
    monkeypatch.setattr(philox_noise, "FEW", 8)
    assert torch.equal(SOURCE.add_gaussian_(layout(torch.zeros(5, 3, 3, 7)), 1.0, 0, 0), expected)


@pytest.mark.slow
def test_the_compiled_operations_draw_the_same() -> None:
    compiled = torch.compile(noise_, dynamic=True)
    for dtype in (torch.float32, torch.float64):
        assert all(philox_noise._agree(compiled, CPU, dtype, count) for count in (1, 99))


def slightly_wrong(sums: Tensor, rows: Tensor, secret: Tensor) -> None:
    noise_(sums, rows, secret)
    sums.mul_(1 + 1e-9)


@pytest.mark.parametrize("wrong", [slightly_wrong, lambda *given: 1 / 0])
def test_a_compiled_kernel_that_fails_or_draws_other_noise_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    class Cuda:
        type = "cuda"

    tensor, arange = torch.tensor, torch.arange
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "tensor", lambda *given, device=None, **options: tensor(*given, **options))
    monkeypatch.setattr(torch, "arange", lambda *ends, device=None, **options: arange(*ends, **options))
    for kernel, right in ((wrong, False), (lambda *given: noise_(*given), True)):
        monkeypatch.setattr(torch, "compile", lambda function, dynamic, kernel=kernel: kernel)
        if right:
            assert kernel_on.__wrapped__(Cuda()) is kernel
        else:
            with pytest.warns(UserWarning, match="longer to draw: (its draws differ|division by zero)"):
                assert kernel_on.__wrapped__(Cuda()) is noise_
    monkeypatch.setattr(philox_noise, "COMPILED", False)
    assert kernel_on.__wrapped__(Cuda()) is kernel_on(CPU) is noise_


def test_draws_match_known_answers() -> None:
    found = draw(5, step=3, dtype=torch.float64)
    assert found.tolist() == pytest.approx(ANSWERS, rel=1e-13)


ANSWERS = [-0.9137633015414579, 1.0694079047676832, -0.9959298146479297, -0.5946327217948796, -1.1620282407746099]
