"""Are the data those of the run, and is its code known here?"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import groupwise
from groupwise.launch.verify.check import CannotTell, Disagrees
from groupwise.launch.verify.record import Record
from groupwise.training.checkout import git_state
from groupwise.training.sums import sha256_of


def data(record: Record) -> str:
    """The SHA-256 of every data file that data.json names, as far as the files are there."""
    listed: dict[str, Any] = record.json("data").get("sha256") or {}
    if not listed:
        raise CannotTell("the examples were made up on the spot or come with a package: data.json names no file")
    root = record.data or Path(str(record.config["paths.data"])).expanduser()
    found = {name: path for name in listed if (path := _find(root, name)) is not None}
    for name, path in found.items():
        if sha256_of(path) != listed[name]:
            raise Disagrees(f"{path} is not the {name} that the run read")
    if len(found) < len(listed):
        absent = next(name for name in listed if name not in found)
        rest = f"; the other {len(found)} files are those of the run" if found else ""
        raise CannotTell(f"{absent} is not in {root}{rest}")
    return f"{len(found)} files in {root} are those of the run"


def code(record: Record) -> str:
    """The commit is known to this checkout, and nothing was changed on top of it."""
    git, here = record.json("git"), git_state()
    if git["sha"] is None:
        raise CannotTell("the run was not made in a checkout")
    if here["sha"] is None:
        raise CannotTell(f"commit {git['sha'][:12]}; this is no checkout, so nothing says whether it is known")
    root = Path(groupwise.__file__).resolve().parents[2]
    known = subprocess.run(["git", "-C", str(root), "cat-file", "-e", f"{git['sha']}^{{commit}}"], capture_output=True)
    if known.returncode != 0:
        raise CannotTell(f"commit {git['sha'][:12]} is not in this checkout")
    if git["dirty"]:
        changed = "diff.patch has them" if (record.folder / "diff.patch").is_file() else "git.json names the files"
        raise CannotTell(f"commit {git['sha'][:12]} with changes that were not committed: {changed}")
    now = "the one here" if here["sha"] == git["sha"] and not here["dirty"] else f"here it is {here['sha'][:12]}"
    return f"commit {git['sha'][:12]}, clean; {now}{' with changes' if here['dirty'] else ''}"


def _find(root: Path, name: str) -> Path | None:
    """The file below `root`; of what is given as a single file, that file. Nothing outside of `root` is looked at."""
    path = root if root.is_file() and root.name == name else root / name
    inside = path.resolve().is_relative_to(root.resolve())
    return path if inside and path.is_file() else None
