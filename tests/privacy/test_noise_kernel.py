"""The noise kernel, compiled for a CPU, draws what the plain operations draw; where it cannot, they stand in."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from groupwise.privacy import NoiseSource, counted_noise
from groupwise.privacy.counted_noise import (
    KERNEL_FEW,
    NUMBERS,
    SOURCE,
    WORD,
    CountedNoise,
    NoiseKernel,
    compile_kernel,
    kernel_of,
)
from groupwise.privacy.noise import COUNT_STREAM

LOOP = """
template <typename T>
void draw(T* out, const T* places, const T* values, const T* streams, const T* stds, int n, const T* a) {
  for (int i = 0; i != n; ++i)
    out[i] = noisy<T>(places[i], values[i], streams[i], stds[i], a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8],
                      a[9], a[10], a[11]);
}
extern "C" void draw_float(float* o, float* p, float* v, float* s, float* d, int n, float* a) {
  draw<float>(o, p, v, s, d, n, a);
}
extern "C" void draw_double(double* o, double* p, double* v, double* s, double* d, int n, double* a) {
  draw<double>(o, p, v, s, d, n, a);
}
"""
NOISE = NoiseSource.from_key(bytes(range(32)), drawn="counted")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> NoiseKernel:
    """The kernel's source behind the two faces that torch's compiler gives it."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "draw.cpp").write_text(f"#include <cmath>\n{SOURCE}{LOOP}")
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "draw.cpp", "-o", "draw.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "draw.so"))

    def together(places: Tensor, values: Tensor, streams: Tensor, stds: Tensor, **numbers: float) -> Tensor:
        assert list(numbers) == list(NUMBERS)
        wide = max((t.dtype for t in (places, values, streams, stds)), key=lambda dtype: dtype.itemsize)
        rows = [
            t.to(wide).contiguous()
            for t in (places, values, streams, stds, torch.tensor([*numbers.values()], dtype=torch.float64))
        ]
        out = torch.empty_like(rows[0])
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, *rows)]
        draw = library.draw_float if wide == torch.float32 else library.draw_double
        draw(*pointers[:5], len(out), pointers[5])
        return out

    def alone(places: Tensor, values: Tensor, stream: float, std: float, **numbers: float) -> Tensor:
        return together(places, values, torch.full_like(values, stream), torch.full_like(values, std), **numbers)

    return NoiseKernel(alone, together)


@pytest.mark.parametrize("digest", [bytes(16), bytes(range(16)), b"\xff" * 16])
@pytest.mark.parametrize("stream", [0, 1, 77, COUNT_STREAM])
@pytest.mark.parametrize("first", [0, 2**20, 2**33 - 401])
def test_entries_are_the_pairs_of_the_plain_operations(
    kernel: NoiseKernel, digest: bytes, stream: int, first: int
) -> None:
    noise, numbers = CountedNoise(digest), CountedNoise(digest)._numbers(torch.float64, 3.0, first)
    drawn = noise.normals(torch.arange(first // 2, first // 2 + 201), stream & WORD)[first % 2 :][:400]
    values = torch.randn(400, dtype=torch.float64)
    found = kernel.alone(torch.arange(400.0), values, stream=float(stream), std=0.7, **numbers)
    assert torch.allclose(found, (values + 0.7 * drawn) / 3.0, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize("divisor", [1.0, 48.3])
def test_a_release_by_the_kernel_is_that_of_plain_operations(
    monkeypatch: pytest.MonkeyPatch, kernel: NoiseKernel, dtype: torch.dtype, chunk: int, divisor: float
) -> None:
    sizes, stds = [(3,), (11, 13), (1,), (0,), (7,), (40,), (2, 2, 3)], [1.0, 0.3, 0.5, 1.0, 0.0, 7.0, 1e-6]
    sums = [torch.randn(size, dtype=dtype) for size in sizes]
    sums[5] = torch.randn(8, 5, dtype=dtype).t()
    plain, by_kernel = ([t.clone() for t in sums] for _ in range(2))
    NOISE.add_gaussians_(plain, stds, 4, divisor)
    monkeypatch.setattr(counted_noise, "kernel_of", lambda device: kernel)
    monkeypatch.setattr(counted_noise, "KERNEL_CHUNK", chunk)
    monkeypatch.setattr(counted_noise, "KERNEL_FEW", 12)
    NOISE.add_gaussians_(by_kernel, stds, 4, divisor)
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
        return (kernel.alone if len(tensors) == 2 else kernel.together)(*tensors, **numbers)

    monkeypatch.setattr(torch._C, "_cuda_jiterator_compile_and_launch_kernel", launch, raising=False)
    noise, places, ones = CountedNoise(bytes(16)), torch.arange(8.0), torch.ones(8, dtype=torch.float64)

    def agrees(made: NoiseKernel) -> bool:
        numbers = noise._numbers(torch.float64, 1.0)
        alone = made.alone(places, ones * 0, stream=2.0, std=1.0, **numbers)
        both = made.together(places, ones * 0, 2 * ones, ones, **numbers)
        return torch.equal(alone, both) and torch.allclose(alone, noise.normals(torch.arange(4), 2))

    assert compile_kernel(torch.device("cuda"), agrees) is not None
    assert seen == [("noisy", False, 1, 2, ["stream", "std", *NUMBERS]), ("noisy", False, 1, 4, list(NUMBERS))]


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
        NoiseKernel(lambda *rows, **numbers: kernel.alone(*rows, **numbers) * (1 + 1e-9), kernel.together),
        NoiseKernel(kernel.alone, lambda a, b, streams, stds, **each: kernel.together(a, b, stds, stds, **each)),
        NoiseKernel(lambda places, *rows, **numbers: kernel.alone(places + 2, *rows, **numbers), kernel.together),
        NoiseKernel(lambda *rows, **numbers: kernel.alone(*rows, **numbers | {"divisor": 1.0}), kernel.together),
        NoiseKernel(lambda *rows, **numbers: kernel.alone(*rows, **numbers | {"first_high": 0.0}), kernel.together),
    ]
    for offered, right in [(kernel, True), *((each, False) for each in wrong)]:
        monkeypatch.setattr(counted_noise, "compile_kernel", lambda device, agrees, it=offered: agrees(it))
        assert kernel_of.__wrapped__(torch.device("cpu")) is right


def test_a_cpu_takes_plain_operations() -> None:
    assert kernel_of(torch.device("cpu")) is None
