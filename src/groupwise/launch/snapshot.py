"""The code that a sweep was submitted with: its jobs run a copy, so that editing the checkout changes none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from groupwise.atomic import write_json
from groupwise.training.checkout import RECORDED, git_state

PARTS = ("run.py", "src", "conf", "sweeps")
HANDED_ON = "GROUPWISE_SWEEP"


def run_from(folder: Path, root: Path) -> NoReturn:
    """Copy the code at `root` into the sweep's `folder`, and let the copy of `run.py` go on in this process's place."""
    code = (folder / "code").resolve()
    copy_code(root, code)
    path = os.pathsep.join(filter(None, [str(code / "src"), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "PYTHONPATH": path, HANDED_ON: str(folder)}
    os.execve(sys.executable, [sys.executable, str(code / "run.py"), *sys.argv[1:]], environment)


def handed_on() -> Path | None:
    """The sweep's folder, in the process that `run_from` has made of the first; not in the children of that."""
    given = os.environ.pop(HANDED_ON, None)
    return None if given is None else Path(given)


def copy_code(root: Path, code: Path) -> None:
    """Copy `PARTS` of the checkout, without what git ignores, and what git knows of it (`RECORDED`)."""
    for name in _files(root):
        source, target = root / name, code / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    write_json(code / RECORDED, git_state(root))


def _files(root: Path) -> list[str]:
    """Names relative to `root`: those that git knows or does not ignore; outside of a checkout, all."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS]
    try:
        done = subprocess.run(listed, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is not None and done.returncode == 0 and done.stdout:
        return sorted({name for name in done.stdout.split("\0") if name})
    found = [root / "run.py"] + [file for part in PARTS[1:] for file in (root / part).rglob("*")]
    return sorted(str(file.relative_to(root)) for file in found if "__pycache__" not in file.parts)
