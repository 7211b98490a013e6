"""Turns numpy's numbers in a state into Python's, and finds what no file gives back without running code."""

from collections import OrderedDict
from copy import copy
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.errors import UserError

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


def unreadable(value: Any) -> tuple[str, Any] | None:
    """The first part of a state that ``torch.load(weights_only=True)`` refuses: its keys, as in "['a'][0]", and itself.

    What is neither a tensor nor plain is written to memory and read back. None where all can be read.

    Raises:
        UserError: of an object that refuses to be written, and says why.
    """
    kind = type(value)
    if kind in PLAIN or (kind in (Tensor, nn.Parameter) and not value.__dict__):
        return None
    if kind in (dict, OrderedDict):
        for name, part in value.items():
            for each in (name, part):
                if found := unreadable(each):
                    return f"[{name!r}]{found[0]}", found[1]
    elif kind in (list, tuple, set):
        for number, part in enumerate(value):
            if found := unreadable(part):
                return f"[{number}]{found[0]}", found[1]
    elif not _comes_back(value):
        return "", value
    return None


def _comes_back(value: Any) -> bool:
    file = BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except UserError:
        raise
    except Exception:  # whatever an object of the user's raises when it is pickled
        return False
    return True
