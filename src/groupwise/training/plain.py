"""Turns numpy's numbers in a state into Python's, which a file returns without running code."""

from collections import OrderedDict
from copy import copy
from typing import Any

import numpy as np

PLAIN = (bool, int, float, str, bytes, type(None))


def plain(value: Any) -> Any:
    """``value`` with Python's numbers and texts for numpy's scalars; without any, it is the very same object.

    In dicts, lists, tuples and sets too, and their copies keep what else they had; tensors are not copied.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        pairs = [(plain(name), plain(part)) for name, part in value.items()]
        if all(name is was and part is value[was] for (name, part), was in zip(pairs, value, strict=True)):
            return value
        changed = copy(value)  # with the _metadata of a module's state
        changed.clear()
        changed.update(pairs)
        return changed
    if type(value) in (list, tuple, set):
        parts = [plain(part) for part in value]
        return value if all(part is was for part, was in zip(parts, value, strict=True)) else type(value)(parts)
    return value
