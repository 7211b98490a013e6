"""Memory and speed of devices, from published data."""

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


_KNOWN = (
    # NVIDIA V100 data sheet (SXM3, 32 GB): 15.7 TFLOP/s, 900 GB/s; DGX-2: NVSwitch, 150 GB/s a direction. It has no
    # bfloat16, and clipping refuses float16.
    # Share: that of float16, as one V100 of a DGX-2H trains a GPT-2 of 1.2 billion parameters at 39 of 125 TFLOP/s
    # (Megatron-LM, 2019, section 5.1).
    Accelerator("v100_32gb", 32 * GIB, {"float32": 15.7e12}, 39 / 125, 900e9, 150e9, 2e-5),
    # NVIDIA A100 data sheet (SXM, 80 GB): 312 and 19.5 TFLOP/s, 2,039 GB/s, NVLink 300 GB/s a direction.
    # Share: 138 TFLOP/s a device at GPT-3's shape, pipeline included (Narayanan et al., 2021, table 1: 44 %).
    Accelerator("a100_80gb", 80 * GIB, {"bfloat16": 312e12, "float32": 19.5e12}, 0.44, 2039e9, 300e9, 2e-5),
    # NVIDIA H100 data sheet (SXM, without sparsity): 989 and 67 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s a direction.
    # Share: 400 TFLOP/s a device (The Llama 3 herd of models, 2024, table 4: 38 to 43 %).
    Accelerator("h100", 80 * GIB, {"bfloat16": 989e12, "float32": 67e12}, 0.4, 3350e9, 450e9, 2e-5),
)
ACCELERATORS = {device.name: device for device in _KNOWN}
