"""Pairs of normals on a CPU: their law and its ends, whatever the sizes and threads, and which runs draw them."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from groupwise.errors import UserError
from groupwise.privacy import cpu_noise
from groupwise.privacy.noise import ALONE, NoiseSource

CPU = torch.device("cpu")
SOURCE = NoiseSource.from_key(bytes(range(32)), drawn="pairs")


def draw(size: int = 200_000, std: float = 1.0, step: int = 0, stream: int = 0, source: NoiseSource = SOURCE):
    return source.add_gaussian_(torch.zeros(size), std, step, stream).numpy()


def pairs_of(first: np.ndarray, second: np.ndarray, std: float = 1.0) -> np.ndarray:
    """(2, n): cosines and sines."""
    out = np.empty((2, len(first)), np.float32)
    cpu_noise.box_muller(first, second, out[0], out[1], np.empty(len(first), np.float32), std)
    return out


@pytest.mark.parametrize("std", [1e-30, 1e-4, 37.0, 1e25])
def test_the_law_is_normal_and_the_test_of_it_can_fail(follows_normal_only, std: float) -> None:
    drawn = draw(20_000, std).astype(np.float64)
    follows_normal_only(drawn / std, 1.0)


def test_tails_and_both_of_a_pair_are_there() -> None:
    drawn = draw(4_000_000)
    assert (np.abs(drawn) > 4.0).sum() == pytest.approx(4e6 * 6.334e-5, abs=64)  # four standard errors
    assert len(np.unique(drawn)) > 0.9 * len(drawn)
    half = cpu_noise.PAIRS_CHUNK // 2
    squares = drawn[: 30 * 2 * half].reshape(30, 2, half) ** 2
    assert abs(np.corrcoef(squares[:, 0].ravel(), squares[:, 1].ravel())[0, 1]) < 5 / math.sqrt(30 * half)


def test_pairs_are_those_of_float64() -> None:
    random = np.random.default_rng(5)
    first = random.integers(-(2**63), 2**63, 50_000) >> random.integers(0, 63, 50_000)  # small words, too
    second = random.integers(-(2**31), 2**31, 50_000).astype(np.int32)
    radius = np.sqrt(-2.0 * np.log(np.maximum(np.abs(first.astype(np.float64)) * 2.0**-63, 2.0**-64)))
    angle = second * (2.0 * np.pi * 2.0**-32)
    truth = 3.0 * np.stack([radius * np.cos(angle), radius * np.sin(angle)])
    assert np.abs(pairs_of(first, second, 3.0) - truth).max() < 1e-5


def test_a_radius_ends_at_nine_standard_deviations_and_is_a_number() -> None:
    first = np.array([0, 1, -1, -(2**63), 2**63 - 1])
    with np.errstate(all="raise"):
        cosines, sines = pairs_of(first, np.zeros(5, np.int32))
    assert cosines.tolist() == pytest.approx([math.sqrt(128 * math.log(2)), *[math.sqrt(126 * math.log(2))] * 2, 0, 0])
    assert not sines.any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1001, cpu_noise.PAIRS_CHUNK, cpu_noise.PAIRS_CHUNK + 3, 50_000])
def test_the_sizes_asked_for_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if size == 50_000:  # several segments, the last one shorter than a chunk
        monkeypatch.setattr(cpu_noise, "PAIRS_CHUNK", 1 << 10)
        monkeypatch.setattr(cpu_noise, "SEGMENT", 1 << 12)
    whole = draw(size)
    again = cpu_noise.pairs(SOURCE._digest(0, 0), 1.0, size)
    parts = [again(min(77, size - start)).copy() for start in range(0, size, 77)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_the_memory_layout_changes_nothing() -> None:
    expected = SOURCE.add_gaussian_(torch.zeros(70, 8, 40, 40), 1.0, 0, 0)
    last = torch.zeros(70, 8, 40, 40).to(memory_format=torch.channels_last)
    strided = torch.zeros(70, 8, 40, 80)[..., ::2]
    for other in (last, strided):
        assert torch.equal(SOURCE.add_gaussian_(other, 1.0, 0, 0), expected)


@pytest.mark.parametrize(
    "other", [{"step": 1}, {"stream": 1}, {"source": NoiseSource.from_key(bytes(32), drawn="pairs")}]
)
def test_another_step_stream_or_key_is_independent_noise(other) -> None:
    noise, another = draw(), draw(**other)
    assert abs(np.corrcoef(noise, another)[0, 1]) < 5 / math.sqrt(len(noise))


def test_a_release_is_the_same_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(cpu_noise, "SEGMENT", ALONE // 2)  # two threads draw for one tensor

    def release(count: int) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        sums = [
            torch.ones(size, dtype=kind)
            for size, kind in ((ALONE, torch.float32), (9, torch.float64), (5, torch.float32))
        ]
        SOURCE.add_gaussians_(sums, [0.5, 2.0, 3.0], step=4, divisor=8.0)
        return sums

    try:
        alone, together = release(1), release(3)
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(alone, together, strict=True):
        assert torch.equal(one, several)
    large = (1 + 0.5 * draw(ALONE, step=4).astype(np.float64)) / 8
    assert np.abs(alone[0].numpy() - large).max() < 1e-6


def test_a_parameter_is_noised_outside_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    SOURCE.add_gaussian_(parameter, 1.0, 0, 0)
    assert parameter.requires_grad and parameter.is_leaf and bool(parameter.any())


def test_large_tensors_take_one_buffer_of_memory() -> None:
    tensor = torch.zeros(1 << 21)
    tracemalloc.start()
    try:
        SOURCE.add_gaussian_(tensor, 1.0, step=0, stream=0)
        assert tracemalloc.get_traced_memory()[1] < 2.2e6
    finally:
        tracemalloc.stop()


def test_one_process_with_a_secret_key_draws_pairs_and_no_other() -> None:
    fresh = NoiseSource.fresh()
    assert fresh.settled(CPU).drawn == fresh.child("stage 1").settled(CPU).drawn == "pairs"
    assert fresh.settled(CPU, processes=2).drawn == "ziggurat"
    assert NoiseSource.from_seed(1).settled(CPU).drawn == "ziggurat"
    assert fresh.settled(torch.device("cuda")).settled(CPU).drawn == "counted"
    assert NoiseSource.fresh(secure=True).settled(CPU).secure
    zeros = torch.zeros(5)
    unsettled = NoiseSource.from_key(SOURCE.key)  # as it always was
    usual = NoiseSource.from_key(SOURCE.key, drawn="ziggurat").add_gaussian_(zeros.clone(), 1.0, 0, 0)
    assert torch.equal(unsettled.add_gaussian_(zeros.clone(), 1.0, 0, 0), usual)
    assert not np.array_equal(draw(5), usual.numpy())
    wide = torch.zeros(5, dtype=torch.float64)
    assert torch.equal(SOURCE.add_gaussian_(wide.clone(), 1.0, 0, 0), unsettled.add_gaussian_(wide, 1.0, 0, 0))


@pytest.mark.parametrize(
    ("state", "drawn"),
    [
        ({}, "ziggurat"),
        ({"noise_counted": False}, "ziggurat"),
        ({"noise_counted": True}, "counted"),
        ({"noise_drawn": "pairs"}, "pairs"),
    ],
)
def test_a_checkpoint_goes_on_with_the_noise_that_it_had(state: dict, drawn: str) -> None:
    source = NoiseSource.from_state({"noise_key": bytes(16), "noise_is_secret": True, **state})
    assert source.drawn == source.settled(CPU).drawn == drawn


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(UserError, match="drawn='dice' is no way to draw noise"):
        NoiseSource(bytes(16), True, drawn="dice")


def test_known_answers_for_ever() -> None:
    """A change here breaks the replay of runs that began before it, and so their guarantee."""
    assert draw(5, step=3, stream=2).tolist() == pytest.approx(FEW, rel=1e-5)
    assert draw((1 << 21) + 7, step=3, stream=2)[-3:].tolist() == pytest.approx(SECOND_SEGMENT, rel=1e-5)
    assert draw((1 << 17) + 7)[1 << 17 :][:2].tolist() == pytest.approx(SECOND_CHUNK, rel=1e-5)


FEW = [1.6872316598892212, 0.04197635129094124, -0.5167675614356995, -0.22292785346508026, 0.42624038457870483]
SECOND_SEGMENT = [0.9653165340423584, 0.9451808333396912, -1.5772892236709595]
SECOND_CHUNK = [-0.7615057826042175, -0.6941739916801453]
