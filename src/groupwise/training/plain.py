"""Turns numpy's numbers in a state into Python's, which a file returns without running code."""

from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves, tree_map_only

PLAIN = (bool, int, float, str, bytes, type(None))


def plain(value: Any) -> Any:
    """``value`` with Python's numbers and texts for numpy's scalars in it; without any, it is the same object."""
    if not any(isinstance(leaf, np.generic) for leaf in tree_leaves(value)):
        return value
    return tree_map_only(np.generic, lambda scalar: scalar.item(), value)
