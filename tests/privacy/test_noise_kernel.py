"""The noise kernel, compiled for a CPU, draws what the plain operations draw; where it cannot, they stand in."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from groupwise.privacy import NoiseSource, counted_noise
from groupwise.privacy.counted_noise import KERNEL_FEW, WORD, CountedNoise, kernel_of
from groupwise.privacy.noise import COUNT_STREAM
from groupwise.privacy.noise_kernel import SOURCE, WORDS, NoiseKernel, compile_kernel

LOOP = """
extern "C" void draw(double* out, const double* places, const double* streams, const double* stds, int n,
                     double a, double b, double c, double d, double single) {
  for (int i = 0; i != n; ++i) out[i] = gaussian<double>(places[i], streams[i], stds[i], a, b, c, d, single);
}
"""
NOISE = NoiseSource.from_key(bytes(range(32)), counted=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> NoiseKernel:
    """The kernel's source behind the two faces that torch's compiler gives it."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "draw.cpp").write_text(f"#include <cmath>\n{SOURCE}{LOOP}")
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "draw.cpp", "-o", "draw.so"], cwd=folder, check=True)
    draw = ctypes.CDLL(str(folder / "draw.so")).draw

    def together(places: Tensor, streams: Tensor, stds: Tensor, **words: float) -> Tensor:
        out, rows = torch.empty_like(places), [t.contiguous() for t in (places, streams, stds)]
        assert all(row.dtype == torch.float64 for row in rows) and list(words) == list(WORDS)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, *rows)]
        draw(*pointers, len(out), *map(ctypes.c_double, words.values()))
        return out

    def alone(places: Tensor, stream: float, std: float, **words: float) -> Tensor:
        return together(places, torch.full_like(places, stream), torch.full_like(places, std), **words)

    return NoiseKernel(alone, together)


@pytest.mark.parametrize("digest", [bytes(16), bytes(range(16)), b"\xff" * 16])
@pytest.mark.parametrize("stream", [0, 1, 77, COUNT_STREAM & WORD])
@pytest.mark.parametrize("first", [0, 2**20, 2**33 - 400])
def test_entries_are_the_pairs_of_the_plain_operations(
    kernel: NoiseKernel, digest: bytes, stream: int, first: int
) -> None:
    noise, words = CountedNoise(digest), CountedNoise(digest)._words(torch.float64)
    expected = noise.normals(torch.arange(first // 2, first // 2 + 200), stream)
    found = kernel.alone(torch.arange(first, first + 400).double(), float(stream), 1.0, **words)
    assert torch.allclose(found, expected, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_a_release_by_the_kernel_is_that_of_plain_operations(
    monkeypatch: pytest.MonkeyPatch, kernel: NoiseKernel, dtype: torch.dtype, chunk: int
) -> None:
    sizes, stds = [(3,), (11, 13), (1,), (0,), (7,), (40,), (2, 2, 3)], [1.0, 0.3, 0.5, 1.0, 0.0, 7.0, 1e-6]
    sums = [torch.randn(size, dtype=dtype) for size in sizes]
    sums[5] = torch.randn(8, 5, dtype=dtype).t()
    plain, by_kernel = ([t.clone() for t in sums] for _ in range(2))
    NOISE.add_gaussians_(plain, stds, 4)
    monkeypatch.setattr(counted_noise, "kernel_of", lambda device: kernel)
    monkeypatch.setattr(counted_noise, "KERNEL_CHUNK", chunk)
    monkeypatch.setattr(counted_noise, "KERNEL_FEW", 12)
    NOISE.add_gaussians_(by_kernel, stds, 4)
    for one, other in zip(plain, by_kernel, strict=True):
        if dtype == torch.float32:
            assert torch.equal(one, other)
        else:
            assert torch.allclose(one, other, rtol=0.0, atol=1e-12)
    assert KERNEL_FEW > 12  # both ways were taken: large ones alone, small ones together


def test_torch_reads_the_source(monkeypatch: pytest.MonkeyPatch, kernel: NoiseKernel) -> None:
    """What torch makes of it before a device is asked: the entry's name, and its arguments in their order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []

    def launch(code: str, name: str, by_reference: bool, outputs: int, tensors: tuple, numbers: dict) -> Tensor:
        seen.append((name, by_reference, outputs, len(tensors), list(numbers)))
        return (kernel.alone if len(tensors) == 1 else kernel.together)(*tensors, **numbers)

    monkeypatch.setattr(torch._C, "_cuda_jiterator_compile_and_launch_kernel", launch, raising=False)
    noise, places = CountedNoise(bytes(16)), torch.arange(8, dtype=torch.float64)

    def agrees(made: NoiseKernel) -> bool:
        alone = made.alone(places, stream=2.0, std=1.0, **noise._words(torch.float64))
        both = made.together(places, torch.full_like(places, 2), torch.ones(8).double(), **noise._words(torch.float64))
        return torch.equal(alone, both) and torch.allclose(alone, noise.normals(torch.arange(4), 2))

    assert compile_kernel(torch.device("cuda"), agrees) is not None
    assert seen == [
        ("gaussian", False, 1, 1, ["stream", "std", *WORDS]),
        ("gaussian", False, 1, 3, list(WORDS)),
    ]


def test_a_kernel_that_draws_otherwise_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="draws differ"):
        assert compile_kernel(torch.device("cuda"), lambda kernel: False) is None

    def fails(kernel: NoiseKernel) -> bool:
        raise RuntimeError("no compiler\nfor this device")

    with pytest.warns(UserWarning, match="longer to draw: no compiler\\.$"):
        assert compile_kernel(torch.device("cuda"), fails) is None


def test_what_a_kernel_is_asked_tells_another_from_the_right_one(
    monkeypatch: pytest.MonkeyPatch, kernel: NoiseKernel
) -> None:
    wrong = [
        NoiseKernel(lambda places, **numbers: kernel.alone(places, **numbers) * (1 + 1e-9), kernel.together),
        NoiseKernel(kernel.alone, lambda places, streams, stds, **words: kernel.together(places, stds, stds, **words)),
        NoiseKernel(lambda places, **numbers: kernel.alone(places + 2, **numbers), kernel.together),
    ]
    for offered, right in [(kernel, True), *((each, False) for each in wrong)]:
        monkeypatch.setattr(counted_noise, "compile_kernel", lambda device, agrees, it=offered: agrees(it))
        assert kernel_of.__wrapped__(torch.device("cpu")) is right


def test_a_cpu_takes_plain_operations() -> None:
    assert kernel_of(torch.device("cpu")) is None
