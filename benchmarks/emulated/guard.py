"""Builds and loads the library that gives a CPU build of torch an emulated cuda:0, before torch is imported.

It patches globals of torch, so the process must be used only for emulation.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from groupwise.cache import cache_folder
from groupwise.errors import UserError

SOURCE = Path(__file__).with_name("guard.cpp")


def why_not() -> str | None:
    """Why the emulated device is not available here, or None."""
    if shutil.which("g++") is None:
        return "the emulated GPU needs a C++ compiler, and there is no g++"
    if next((_torch_folder() / "lib").glob("libtorch_cuda*"), None):
        return "the emulated GPU needs a CPU build of torch, and this build supports real GPUs"
    return None


def load() -> None:
    """Make `cuda:0` exist for torch, which must not have been imported.

    Raises:
        UserError: no compiler, a CUDA build of torch, torch is already imported, or the compiler fails.
    """
    if reason := why_not():
        raise UserError(f"{reason[0].upper()}{reason[1:]}.")
    if "torch" in sys.modules:
        raise UserError("torch was imported before the emulated GPU was loaded: start a process of its own.")
    library = ctypes.CDLL(str(_built()))
    import torch

    library.claim_cuda()
    anything: Any = torch
    anything.cuda.is_available = lambda: False  # no driver is queried
    anything.cuda._lazy_init = lambda: None
    anything.cuda.is_bf16_supported = lambda including_emulation=True: True
    anything.cuda.amp.common.amp_definitely_not_available = lambda: False
    # Fake tensors have no memory; the address of their storage object shows whether two of them share one.
    anything.UntypedStorage.data_ptr = lambda self: self._cdata
    anything.Tensor.data_ptr = lambda self: (
        self.untyped_storage()._cdata + self.storage_offset() * self.element_size()
        if self.device.type == "cuda"
        else anything._C.TensorBase.data_ptr(self)
    )


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _built() -> Path:
    """The path of the library for this torch, compiled into the cache folder if it is not there."""
    torch = _torch_folder()
    name = hashlib.sha256(f"{version('torch')} {torch} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = cache_folder() / "emulated"
    library = folder / f"guard-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{library.name}.{os.getpid()}"
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), "-o", str(part)]
    command += [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run([*command, f"-Wl,-rpath,{torch / 'lib'}"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"g++ cannot compile {SOURCE.name} against this torch: {done.stderr.strip().splitlines()[0]}")
    os.replace(part, library)  # several processes may have built it at once
    return library
