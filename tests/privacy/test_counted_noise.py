"""Counted noise: Philox's known answers, the law, and the same draws in any layout and any company."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, counted_noise
from groupwise.privacy.counted_noise import LARGEST, WORD, CountedNoise, batches, philox
from groupwise.privacy.noise import COUNT_STREAM

SOURCE = NoiseSource.from_key(bytes(range(32)), drawn="counted")
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


@pytest.mark.parametrize("as_tensors", [(), (0,), (0, 1), (2,), (0, 1, 2, 3)])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_its_known_answers(
    counter: list[int], key: list[int], answer: list[int], as_tensors: tuple[int, ...]
) -> None:
    words = [torch.tensor([word, 5]) if place in as_tensors else word for place, word in enumerate(counter)]
    found = philox(words, (key[0], key[1]))
    assert [int(word[0]) if isinstance(word, Tensor) else word for word in found] == answer


def test_draws_are_the_box_muller_pairs_of_the_blocks() -> None:
    digest = bytes(range(16))
    words = [int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12)]
    found = CountedNoise(digest).normals(torch.tensor([7]), 3).tolist()
    w: list[int] = list(philox((7, 3, words[2], words[3]), (words[0], words[1])))  # type: ignore[arg-type]
    radius = math.sqrt(-2 * math.log(((w[0] << 32) + w[1] + 0.5) / 2**64))
    angle = 2 * math.pi * ((w[2] << 32) + w[3]) / 2**64
    assert found == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], rel=1e-12)


@pytest.mark.parametrize("place", range(16))
def test_every_secret_byte_counts(place: int) -> None:
    digest = bytearray(32)
    first = CountedNoise(bytes(digest)).normals(torch.arange(50), 0)
    digest[place] ^= 0x80
    assert not bool((CountedNoise(bytes(digest)).normals(torch.arange(50), 0) == first).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law(follows_normal_only, dtype: torch.dtype) -> None:
    noise = draw(200_000, dtype=dtype, std=3.0).double().numpy()
    follows_normal_only(noise, 3.0)
    pairs = noise.reshape(-1, 2)
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 4 / math.sqrt(len(pairs))  # both of a pair, and their sizes
    assert abs(np.corrcoef(np.abs(pairs).T)[0, 1]) < 4 / math.sqrt(len(pairs))
    assert abs(np.corrcoef(noise[:-2], noise[2:])[0, 1]) < 4 / math.sqrt(len(noise))
    beyond = np.abs(noise / 3.0) > 4  # 12.7 are expected, chance of more than 32 or fewer than 2 below 1e-5
    assert 2 <= beyond.sum() <= 32


def test_the_tails_reach_beyond_those_of_single_words() -> None:
    """The smallest first two words there are give 9.5 standard deviations; 32 bits would end at 6.8."""
    assert math.sqrt(-2 * math.log(0.5 / 2**64)) > 9.4
    smallest = torch.zeros(1, dtype=torch.float64).add_(torch.zeros(1).double().add_(0.5), alpha=2.0**-64)
    assert float(smallest.log().mul(-2).sqrt()) > 9.4


def test_steps_streams_and_keys_are_independent() -> None:
    base = draw(20_000, dtype=torch.float64)
    others = [
        draw(20_000, step=1, dtype=torch.float64),
        draw(20_000, stream=1, dtype=torch.float64),
        draw(20_000, stream=COUNT_STREAM, dtype=torch.float64),
        NoiseSource.from_key(bytes(range(1, 33)), drawn="counted").add_gaussian_(
            torch.zeros(20_000).double(), 1.0, 0, 0
        ),
        SOURCE.child("shard 0").add_gaussian_(torch.zeros(20_000).double(), 1.0, 0, 0),
    ]
    for other in others:
        assert stats.pearsonr(base.numpy(), other.numpy()).pvalue > 1e-5
        assert not bool((base == other).any())


@pytest.mark.parametrize(
    "layout", [lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.mT.contiguous().mT, lambda t: t]
)
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 21])
def test_neither_layout_nor_chunks_change_a_draw(monkeypatch: pytest.MonkeyPatch, layout, chunk: int) -> None:
    expected = draw(5, 3, 3, 7)
    monkeypatch.setattr("groupwise.privacy.noise.chunk_on", lambda device: chunk)
    assert torch.equal(SOURCE.add_gaussian_(layout(torch.zeros(5, 3, 3, 7)), 1.0, 0, 0), expected)


@pytest.mark.parametrize("most", [4, 10, 40, 1 << 21])
def test_a_release_draws_together_what_each_tensor_draws_alone(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("groupwise.privacy.noise.batches", lambda sizes, few: batches(sizes, few, most))
    sizes = [(3,), (2, 5), (1,), (0,), (7,), (2, 2, 3)]
    tensors = [torch.zeros(size) for size in sizes]
    stds = [1.0, 2.0, 0.5, 1.0, 0.0, 3.0]
    SOURCE.add_gaussians_(tensors, stds, 4)
    for stream, (tensor, std) in enumerate(zip(tensors, stds, strict=True)):
        assert torch.equal(tensor, SOURCE.add_gaussian_(torch.zeros(sizes[stream]), std, 4, stream))
    assert float(tensors[5].abs().min()) > 0.0 and not tensors[4].any()


def test_batches_are_small_and_none_is_lost() -> None:
    found = list(batches([5, 5, 5, 30, 1, 0, 2], 10, 10))
    assert found == [[0, 1], [3], [2, 4, 5, 6]]
    assert list(batches([5, 1, 5, 2, 3], 3, 4)) == [[0], [2], [1, 3], [4]]
    assert list(batches([])) == []


def test_a_source_that_does_not_say_counts_off_the_cpu_alone() -> None:
    source = NoiseSource.from_key(SOURCE.key, is_secret=False)
    here, there = source.settled(torch.device("cpu")), source.settled(torch.device("cuda"))
    assert (here.drawn, there.drawn, there.settled(torch.device("cpu")).drawn) == ("ziggurat", "counted", "counted")
    zeros = torch.zeros(9)
    usual = source.add_gaussian_(zeros.clone(), 1.0, 2, 3)
    assert torch.equal(here.add_gaussian_(zeros.clone(), 1.0, 2, 3), usual)
    assert torch.equal(there.add_gaussian_(zeros.clone(), 1.0, 2, 3), SOURCE.add_gaussian_(zeros.clone(), 1.0, 2, 3))
    assert not torch.equal(there.add_gaussian_(zeros.clone(), 1.0, 2, 3), usual)
    assert there.child("stage 1").drawn == "counted"


def test_known_answers_for_ever() -> None:
    """A change here breaks the replay of runs that began before it, and so their guarantee."""
    found = draw(5, step=3, stream=2, dtype=torch.float64)
    assert found.tolist() == pytest.approx(ANSWERS, rel=1e-13)


ANSWERS = [-0.29604632803380776, -1.3970495596460546, 0.36536160251228056, -0.8388575753810228, -0.8199460926631108]


def test_more_entries_than_places_are_refused() -> None:
    class Huge:
        def numel(self) -> int:
            return LARGEST + 1

    with pytest.raises(UserError, match=r"at most 2\^33"):
        CountedNoise(bytes(16)).adder(Huge(), 1.0, 0)  # type: ignore[arg-type]
    assert counted_noise.ROUNDS == 10


def test_places_are_where_their_tensor_is() -> None:
    noise = CountedNoise(bytes(16))
    devices = [noise._places(torch.empty(4, device=device)).device.type for device in ("cpu", "meta", "cpu")]
    assert devices == ["cpu", "meta", "cpu"]
