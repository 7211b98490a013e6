"""Replaces NumPy scalars in a state by Python numbers, which can be read from a file without running code."""

from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves, tree_map_only

PLAIN = (bool, int, float, str, bytes, type(None))


def plain(value: Any) -> Any:
    """``value`` with its NumPy scalars replaced by Python numbers and strings; the same object if it has none."""
    if not any(isinstance(leaf, np.generic) for leaf in tree_leaves(value)):
        return value
    return tree_map_only(np.generic, lambda scalar: scalar.item(), value)
