"""Where a result came from: code, packages, machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import groupwise
from groupwise.training.checkout import git_state

__all__ = ["device_name", "environment", "git_state", "peak_memory_bytes", "resources", "usable_cores"]

PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "prv-accountant",
    "dp-accounting",
    "hydra-core",
    "omegaconf",
    "transformers",
    "tokenizers",
    "peft",
    "datasets",
    "sacrebleu",
    "rouge-score",
)


def environment() -> dict[str, Any]:
    """Versions of Python and of the packages that compute (``versions.<name>``), platform, CPU cores."""
    versions = {"python": platform.python_version(), "groupwise": groupwise.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {"versions": versions, "platform": platform.platform(), "cpu_count": usable_cores()}


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The device in words: a GPU's model, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was held at once: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def resources(device: torch.device, seconds: float) -> dict[str, Any]:
    """What every row says of the machine: the device, the time that the run took and the memory."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "wall_seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
    }
