"""Seals the state of a private training, so that an altered one is not gone on from.

A step that is taken again repeats its noise, which is private only if it repeats everything else too.
"""

from hashlib import sha256
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.training.plain import plain

NOISE = ("noise_key", "noise_is_secret", "noise_secure", "noise_generator")
SEALED = ("step", "plan", "processes", "microbatch", "thresholds", "clip_plan", *NOISE, "model", "optimizer")


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with its seal, and with Python's numbers for numpy's, as a file gives it back."""
    state = plain(state)
    return {**state, "seal": seal_of(state)}


def seal_of(state: dict[str, Any]) -> str:
    """SHA-256 of all that the next step of a private training depends on, tensors by dtype, shape and bytes."""
    found = sha256()
    _tell(found, [state.get(name) for name in SEALED])
    return found.hexdigest()


def _tell(found: _Hash, value: Any) -> None:
    """A value of another kind than these, as a model's extra state may be, counts as its type."""
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        found.update(f"{whole.dtype} {tuple(whole.shape)}\n".encode())
        found.update(whole.flatten().view(torch.uint8).numpy())
    elif isinstance(value, dict):
        found.update(b"dict %d\n" % len(value))
        for name in sorted(value, key=repr):
            found.update(f"{name!r}\n".encode())
            _tell(found, value[name])
    elif isinstance(value, list | tuple):
        found.update(b"list %d\n" % len(value))
        for part in value:
            _tell(found, part)
    elif isinstance(value, bool | int | float | str | bytes | None):
        found.update(f"{value!r}\n".encode())
    else:
        found.update(f"{type(value).__name__}\n".encode())


def check_seal(state: Any, steps: int) -> None:
    """Refuse what is not as `seal_of` saw it, or at no step of a plan of ``steps`` steps.

    Raises:
        UserError: saying so.
    """
    if not isinstance(state, dict) or not {*SEALED, "seal"} <= state.keys():
        raise UserError(
            "The state is none of a private training, or an earlier version's: give what private.state_dict() returns."
        )
    kept = state["seal"] == seal_of(state) or state["seal"] == seal_of(plain(state))  # of an optimiser with numpy's lr
    if not kept or not 0 <= state["step"] <= steps:
        raise UserError(
            "The state's weights, optimiser, thresholds or step are not those that were saved: they trained on after "
            "state_dict(), or were altered. Save a state to a file at once, or copy.deepcopy it."
        )
