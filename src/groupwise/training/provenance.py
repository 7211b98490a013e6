"""Records the code, packages and machine that a result comes from."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import groupwise
from groupwise.checkout import CHECKOUT

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("torch", "torchvision", "numpy", "scipy", "prv-accountant", "dp-accounting", "hydra-core", "omegaconf"),
    *("transformers", "tokenizers", "peft", "datasets", "sacrebleu", "rouge-score"),
)


def environment() -> dict[str, Any]:
    """The versions of Python and of the main packages (``versions.<name>``), the platform, and the CPU cores."""
    versions = {"python": platform.python_version(), "groupwise": groupwise.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {"versions": versions, "platform": platform.platform(), "cpu_count": usable_cores()}


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of torch's tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new `peak_memory_bytes`, as a process may run several cells, if the system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # in Linux: the peak of resident memory


def resources(device: torch.device, seconds: float) -> dict[str, Any]:
    """The columns of a result row about the machine: device, seconds of the run, and peak memory."""
    import torch  # imported here, as checking a sweep needs no torch

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "device_type": device.type,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "wall_seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def processor() -> str:
    """The model of the processor on Linux, its architecture elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} ({sys.platform})"


RECORDED = "git-state.json"
"""A file in a copy of a checkout, with the `git_state` of the original when the copy was made."""


def git_state(root: Path | None = None) -> dict[str, Any]:
    """``sha``, ``dirty``, ``untracked`` and ``diff`` of the checkout at ``root`` (by default that of this package).

    A copy of a checkout has the state of the original (`RECORDED`). Otherwise, without git or outside of a checkout,
    sha and dirty are None.
    """
    root = root or CHECKOUT
    if (root / RECORDED).is_file():
        return json.loads((root / RECORDED).read_text(encoding="utf-8"))
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():  # installed inside another project's checkout
        return {"sha": None, "dirty": None, "untracked": [], "diff": ""}
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    diff = (_git(root, "diff", "HEAD") if sha else None) or ""
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {"sha": sha.strip() if sha else None, "dirty": bool(diff or untracked), "untracked": untracked, "diff": diff}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
