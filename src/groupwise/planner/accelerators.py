"""Memory and speed of devices, from published data."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """A device of a pipeline, and its links to others."""

    name: str
    memory: float
    """Bytes."""
    peak: dict[str, float]
    """Operations per second by dtype, from the data sheet. The first dtype is the default for frozen weights."""
    share: float
    """The share of the peak that is achieved when training large transformers."""
    bandwidth: float
    """Bytes per second between the device and its memory."""
    link: float
    """Bytes per second to a neighbouring device, in one direction."""
    latency: float
    """Seconds until the first byte of a message arrives."""
    reserved: float = 1e9
    """Bytes that tensors cannot use: CUDA context, workspaces of libraries, fragmentation."""
    kind: str = "cuda"
    """torch's device type. Layers choose their norm method by it, and optimisers their kernels."""


_TENSOR_CORES = ("bfloat16", "float16")
_KNOWN = (
    # NVIDIA V100 data sheet (SXM3, 32 GB): 125 and 15.7 TFLOP/s, 900 GB/s; DGX-2: NVSwitch, 150 GB/s a direction.
    # Share: one V100 of a DGX-2H trains a GPT-2 of 1.2 billion parameters at 39 TFLOP/s (Megatron-LM, 2019,
    # section 5.1).
    Accelerator("v100_32gb", 32 * GIB, {"float16": 125e12, "float32": 15.7e12}, 39 / 125, 900e9, 150e9, 2e-5),
    # NVIDIA A100 data sheet (SXM, 80 GB): 312 and 19.5 TFLOP/s, 2,039 GB/s, NVLink 300 GB/s a direction.
    # Share: 138 TFLOP/s a device at GPT-3's shape, pipeline included (Narayanan et al., 2021, table 1: 44 %).
    Accelerator(
        "a100_80gb", 80 * GIB, dict.fromkeys(_TENSOR_CORES, 312e12) | {"float32": 19.5e12}, 0.44, 2039e9, 300e9, 2e-5
    ),
    # NVIDIA H100 data sheet (SXM, without sparsity): 989 and 67 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s a direction.
    # Share: 400 TFLOP/s a device (The Llama 3 herd of models, 2024, table 4: 38 to 43 %).
    Accelerator("h100", 80 * GIB, dict.fromkeys(_TENSOR_CORES, 989e12) | {"float32": 67e12}, 0.4, 3350e9, 450e9, 2e-5),
)
ACCELERATORS = {device.name: device for device in _KNOWN}
