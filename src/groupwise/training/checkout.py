"""Which code this is: the commit, and what was changed since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import groupwise

RECORDED = "git-state.json"
"""In a copy of a checkout: what git said of the original when the copy was made."""


def git_state(root: Path | None = None) -> dict[str, Any]:
    """``sha``, ``dirty``, ``untracked`` and ``diff`` of the checkout at ``root`` (default: this package's).

    A copy says what was recorded with it. Without git, or outside of a checkout, sha and dirty are None.
    """
    root = root or Path(groupwise.__file__).resolve().parents[2]
    if (root / RECORDED).is_file():
        return json.loads((root / RECORDED).read_text(encoding="utf-8"))
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():  # installed somewhere inside another project
        return {"sha": None, "dirty": None, "untracked": [], "diff": ""}
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    diff = (_git(root, "diff", "HEAD") if sha else None) or ""
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "sha": sha.strip() if sha else None,
        "dirty": bool(diff or untracked),
        "untracked": untracked,
        "diff": diff,
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
