"""Adds a checksum to the state of a private training, so that an altered one is refused.

A step that is taken again repeats its noise, which is private only if it repeats everything else too.
"""

from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from groupwise.errors import UserError
from groupwise.training.plain import PLAIN, plain

COVERED = ("step", "plan", "processes", "microbatches", "thresholds", "clip_plan", "noise_key", "model", "optimizer")


def with_checksum(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` and its checksum, with Python's numbers for numpy's, as a file returns it."""
    state = plain(state)
    return {**state, "checksum": checksum(state)}


def checksum(state: dict[str, Any]) -> str:
    """SHA-256 of all that the next step of a private training depends on."""
    noise = {name: state[name] for name in sorted(state) if name.startswith("noise_")}
    return digest([noise, *(state.get(name) for name in COVERED)])


def digest(nested: Any) -> str:
    """SHA-256 of nested lists and dicts: of tensors and arrays by dtype, shape and bytes, of numbers and texts.

    A value of another kind, as a model's extra state may be, counts as its type.
    """
    leaves, spec = tree_flatten(nested)
    found = sha256(repr(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            whole = leaf.detach().cpu().contiguous()
            found.update(f"{whole.dtype} {tuple(whole.shape)}\n".encode())
            found.update(whole.flatten().view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            found.update(f"{leaf.dtype} {leaf.shape}\n".encode() + leaf.tobytes())
        else:
            found.update(f"{leaf!r}\n".encode() if isinstance(leaf, PLAIN) else f"{type(leaf).__name__}\n".encode())
    return found.hexdigest()


def check_state(state: Any, steps: int) -> None:
    """Refuse a state that is not as `with_checksum` saw it, or at no step of a plan of ``steps`` steps.

    Raises:
        UserError: saying so.
    """
    if not isinstance(state, dict) or not {*COVERED, "checksum"} <= state.keys():
        raise UserError(
            "The state is none of a private training, or an earlier version's: give what private.state_dict() returns."
        )
    if state["checksum"] != checksum(state) or not 0 <= state["step"] <= steps:
        raise UserError(
            "The state's weights, optimiser, thresholds or step are not those that were saved: they trained on after "
            "state_dict(), or were altered. Save a state to a file at once, or copy.deepcopy it."
        )
