"""Noise on a GPU is Gaussian, and equal to that on the CPU, whichever of the two the run began on."""

import pytest
import torch
from scipy import stats

from groupwise.privacy import NoiseSource, philox_noise
from groupwise.privacy.philox_noise import noise_

pytestmark = pytest.mark.cuda
COUNTED = NoiseSource(bytes(range(32)), generator="Philox")
SIZES = [(70_001,), (64, 32, 3, 3), (1,), (500, 301)]


def released(source: NoiseSource, device: torch.device, dtype: torch.dtype, step: int = 0) -> list[torch.Tensor]:
    tensors = [torch.zeros(size, dtype=dtype, device=device) for size in SIZES]
    tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
    source.add_gaussians_(tensors, [0.5, 1.0, 2.0, 3.0], step)
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_gaussian_with_its_std(device: torch.device, dtype: torch.dtype) -> None:
    noise = released(NoiseSource(bytes(32)).settled(device), device, dtype)
    for tensor, std in ((noise[0], 0.5), (noise[3], 3.0)):
        sample = tensor.flatten().double().numpy()
        assert stats.kstest(sample / std, "norm").pvalue > 1e-4
        assert stats.kstest(sample / std * 1.5, "norm").pvalue < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_matches_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    there, here = released(COUNTED, device, dtype), released(COUNTED, torch.device("cpu"), dtype)
    rounding = 2e-7 if dtype == torch.float32 else 1e-13
    for on_device, on_cpu in zip(there, here, strict=True):
        assert float((on_device - on_cpu).abs().max()) <= rounding * float(on_cpu.abs().max())
    assert all(not torch.equal(a, b) for a, b in zip(there, released(COUNTED, device, dtype, step=1), strict=True))
    for again, first in zip(released(COUNTED, device, dtype), there, strict=True):
        assert torch.equal(again, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_kernel_matches_plain_operations(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cuda":
        pytest.skip("only a GPU compiles the kernel")
    assert philox_noise.kernel_on(device) is not noise_, "Triton does not work here"
    by_kernel = released(COUNTED, device, dtype)
    monkeypatch.setattr(philox_noise, "kernel_on", lambda device: noise_)
    rounding = 1e-7 if dtype == torch.float32 else 1e-14
    for one, other in zip(by_kernel, released(COUNTED, device, dtype), strict=True):
        assert float((one - other).abs().max()) <= rounding * float(other.abs().max())


def test_release_into_the_same_memory_is_recorded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    monkeypatch.setattr(philox_noise, "_graphs", {})
    tensors, stds = [torch.zeros(size, device=device) for size in SIZES], [0.5, 1.0, 2.0, 3.0]
    for step in range(philox_noise.STEADY + 4):
        found = [tensor.zero_() for tensor in tensors]
        COUNTED.add_gaussians_(found, [(1 + step) * std for std in stds], step, 1.0 + step)
        fresh = [torch.zeros(size, device="cpu") for size in SIZES]
        COUNTED.add_gaussians_(fresh, [(1 + step) * std for std in stds], step, 1.0 + step)
        for on_device, on_cpu in zip(found, fresh, strict=True):
            torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-6, atol=1e-6)
    assert len(philox_noise._graphs) == 1


def test_run_begun_on_the_cpu_keeps_its_noise_on_a_gpu(device: torch.device) -> None:
    source = NoiseSource(bytes(32)).settled(torch.device("cpu"))
    for on_device, on_cpu in zip(
        released(source, device, torch.float32), released(source, torch.device("cpu"), torch.float32), strict=True
    ):
        assert float((on_device - on_cpu).abs().max()) <= 2e-7 * float(on_cpu.abs().max())
