"""Imports torchvision even if it was built for another torch. transformers and peft need that import to work."""

import importlib.util
import sys
from types import ModuleType

import torch

# A library is unregistered when it is garbage-collected, so it is kept until the process ends.
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Import torchvision; if its compiled operators cannot be loaded, without them.

    The torchvision of the package index is built for CUDA. With a CPU-only torch its compiled library does not
    load, and importing torchvision, transformers or peft fails with "operator torchvision::nms does not exist".
    In that case the missing operators are declared without an implementation, and the import is repeated. Data
    sets and transforms then work; nms, roi_align and the image codecs of `torchvision.io` do not. Call this
    before the first import of transformers.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: the import fails for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise RuntimeError(
                f"torchvision cannot be imported with torch {torch.__version__} ({error}): install both of one build, "
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
    """Import torchvision, if it is installed, before transformers or peft do."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision"):
        import_torchvision()
