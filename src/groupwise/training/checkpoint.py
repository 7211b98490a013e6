"""Writes checkpoints atomically, and refuses to read damaged ones."""

import pickle
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from groupwise.atomic import remove, write_atomically
from groupwise.errors import UserError, reason
from groupwise.training.plain import plain
from groupwise.training.ranks import Ranks


def previous(path: Path) -> Path:
    """The path of the checkpoint before the one at ``path``: checkpoint.pt -> checkpoint-previous.pt."""
    return path.with_stem(f"{path.stem}-previous")


def save_checkpoint(path: str | Path, state: Mapping[str, Any], keep: str | Path | None = None) -> None:
    """Write ``state`` to ``path`` atomically, readable by its owner only.

    The file holds the noise key, and anyone with the key can remove the noise from the released model.

    Args:
        state: tensors, numbers, text, bytes and None, in lists and dicts. NumPy scalars become Python numbers.
        keep: the path to which an existing file is moved; None overwrites it.

    Raises:
        UserError: the file cannot be written, or `load_checkpoint` could not read it. An existing file then stays.
    """
    path, state = Path(path), plain(state)
    try:
        write_atomically(path, lambda file: _write(state, path, file), None if keep is None else Path(keep))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(
            f"The checkpoint {path} cannot be written ({error}): free space on the disk, or give another folder."
        ) from error


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, with its tensors on ``device``.

    Raises `UserError` if the file is missing, damaged or not a checkpoint, or if reading it would run code.
    """
    try:
        if zipfile.ZipFile(path).testzip() is not None:  # torch does not compare the checksums
            raise zipfile.BadZipFile
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"There is no checkpoint {path}: give the path of a saved one, or start without it.") from error
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise UserError(
            f"The checkpoint {path} contains {name[1] if name else 'an object'}, and reading it could run code: if you "
            "wrote the file yourself, read it with torch.load(path, weights_only=False)."
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"The checkpoint {path} is truncated or altered: start afresh in another folder.") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a checkpoint of a run: it contains a {type(state).__name__}, not a dict.")
    return state


def load_newest(
    path: Path, read: Callable[[Path], dict[str, Any]] = load_checkpoint, ranks: Ranks | None = None
) -> tuple[Path, dict[str, Any]]:
    """Read the last checkpoint, at ``path``. If that fails, read the one before it, with a warning on stderr.

    All processes of a run must call this together. They get the path and the content of the same checkpoint, or a
    `UserError` if there is none that all can read.
    """
    ranks = ranks or Ranks()
    problems: list[str] = []
    for candidate in (path, previous(path)):
        state, problem = dict[str, Any](), None
        try:
            state = read(candidate)
        except UserError as error:
            problem = str(error)
        found = next(filter(None, ranks.gather(problem)), None)
        if found is None:
            if problems and ranks.main:
                print(f"warning: {problems[0].rsplit(': ', 1)[0]}; resuming from the one before it.", file=sys.stderr)
            return candidate, state
        problems.append(found)
    raise UserError(problems[0].replace("in another folder", "with overwrite=true"))


def forget_checkpoints(folder: Path) -> None:
    """Remove all files from a run's folder that hold the noise key: checkpoints, and partial files of killed runs."""
    held = (*folder.glob("checkpoint*"), *folder.glob(".*.partial"))
    for entry in sorted(held, key=Path.is_dir):  # first the files, which name the folders of a pipeline's checkpoint
        remove(entry)


def _write(state: Mapping[str, Any], path: Path, file: BufferedRandom) -> None:
    """Write the state, or raise a `UserError` if reading it back would run code."""
    try:
        torch.save(state, file)
        file.seek(0)
        refused = ", ".join(get_unsafe_globals_in_checkpoint(file))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        refused = reason(error)
    if refused:
        raise UserError(
            f"The checkpoint {path} cannot store this state ({refused}), as reading it back would run code: use "
            "tensors, numbers and text, in lists and dicts."
        )
