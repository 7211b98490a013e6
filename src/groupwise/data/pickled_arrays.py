"""The standard folder's files are pickles, and a pickle may run code; this opens text, numbers and arrays only."""

import io
import pickle
from typing import Any

ALLOWED = {
    (module, name)
    for module, names in {
        "numpy": ("dtype", "ndarray"),
        "numpy.core.multiarray": ("_reconstruct",),
        "numpy._core.multiarray": ("_reconstruct",),
        "numpy._core.numeric": ("_frombuffer",),
    }.items()
    for name in names
}
"""What pickles of NumPy arrays look up, by versions old and new."""


def load_arrays(content: bytes) -> Any:
    """Return what a pickle of lists, dicts, text, numbers and NumPy arrays holds (text of Python 2 as latin-1).

    Raises:
        pickle.UnpicklingError: it looks up anything else, of which nothing is run; other errors as `pickle` has them.
    """
    return _Arrays(io.BytesIO(content), encoding="latin1").load()


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it looks up {module}.{name}, which no array needs")
        return super().find_class(module, name)
