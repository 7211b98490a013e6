"""Imports torchvision beside any torch, and before transformers and peft, which fall where it does not import."""

import importlib.util
import sys
from types import ModuleType

import torch

# A library is unregistered when it is collected, so it is kept as long as the process lives.
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, and where only its compiled operators are missing, without them.

    The package index's torchvision is built for CUDA. Beside a CPU-only torch its compiled library does not
    load and the import stops at "operator torchvision::nms does not exist", that of transformers and peft
    too. Then the operators it asks for are declared, without an implementation, and the import is repeated:
    data sets and transforms work; nms, roi_align and the image codecs of `torchvision.io` do not. Where
    torchvision imports by itself nothing is done. Call this before the first import of transformers, too.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: it fails to import for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise RuntimeError(
                f"torchvision does not import beside torch {torch.__version__} ({error}): install a pair of one build, "
                "such as pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu."
            ) from error
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return importlib.import_module("torchvision")


def import_torchvision_first() -> None:
    """Import torchvision where there is one, before transformers or peft do, which then find it in working order."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision"):
        import_torchvision()
