"""Differentially private deep learning with group-wise clipping."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.private import Private, make_private

__version__ = "0.1.0"
__all__ = ["Private", "__version__", "make_private"]


def __getattr__(name: str) -> Any:
    """`make_private` and `Private`, when they are asked for: the package alone imports no torch."""
    if name in ("Private", "make_private"):
        from groupwise import private

        return getattr(private, name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
