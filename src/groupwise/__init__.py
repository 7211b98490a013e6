"""Differentially private deep learning with group-wise clipping."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.clipping import gradient_norms
    from groupwise.private import Private, make_private

__version__ = "0.1.0"
__all__ = ["Private", "__version__", "gradient_norms", "make_private"]
_OWNERS = {
    "Private": "groupwise.private",
    "gradient_norms": "groupwise.clipping",
    "make_private": "groupwise.private",
}


def __getattr__(name: str) -> Any:
    """The public names, when they are asked for: the package alone imports no torch."""
    if name in _OWNERS:
        return getattr(import_module(_OWNERS[name]), name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
