"""Checkpoints: written whole or not at all, and read back only when they are sound."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from groupwise.atomic import write_atomically
from groupwise.errors import UserError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, text, bytes, None, lists, dicts) to ``path`` atomically.

    Only the owner may read the file: it holds the key of the noise, and whoever has the key can take the
    noise off what a run releases. Raises `UserError` when the disk refuses, and leaves the previous
    checkpoint as it was.
    """
    try:
        write_atomically(path, lambda file: torch.save(state, file))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(
            f"the checkpoint {path} cannot be written ({error}): make room, or change paths.results."
        ) from error


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, tensors on ``device``, running no code from the file.

    Raises `UserError` when the file is missing, truncated, altered or something else.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch itself checks no sums
        if broken is not None:
            raise zipfile.BadZipFile(f"{broken} is altered")
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {path}: start the run without resume.") from error
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(
            f"the checkpoint {path} is truncated or altered: remove it, and the run starts anew."
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is no checkpoint of a run: it holds a {type(state).__name__}, not a dict.")
    return state
