"""`SHA256SUMS`: what the files of a finished run were, in the format of sha256sum(1) (`sha256sum -c SHA256SUMS`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from groupwise.atomic import write_text

SUMS = "SHA256SUMS"
UNSUMMED = (SUMS, "DONE", ".lock", "wandb", "tensorboard")
"""At the top of the folder, beside checkpoints and what a killed write left: not summed."""


def write_sums(folder: Path) -> None:
    """Write the sums of all files in `folder` that stay, sorted by name."""
    write_text(folder / SUMS, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in summed_files(folder)))


def summed_files(folder: Path) -> list[str]:
    """Relative names of the files that belong into the sums, sorted."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name.as_posix() for name in found if _stays(name))


def sha256_of(path: Path) -> str:
    """The sum of a file's content, 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stays(name: Path) -> bool:
    top = name.parts[0]
    return top not in UNSUMMED and not top.startswith("checkpoint") and not name.name.endswith(".partial")
