"""Keeps numbers that take seconds to find on disk: calibrated noise, what a machine's arithmetic costs."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text


def cache_folder() -> Path:
    """Return ``$GROUPWISE_CACHE``, else ``$XDG_CACHE_HOME/groupwise``, else ``~/.cache/groupwise``."""
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("GROUPWISE_CACHE") or f"{shared}/groupwise")


def read_cache(kind: str, key: dict[str, Any]) -> Any | None:
    """Return the value stored under ``key``, or None when it is absent, broken or unreadable. Never raises."""
    try:
        entry = json.loads(_path(kind, key).read_text())
        # The key is stored beside the value: a truncated file or a colliding name is a miss, not an answer.
        return entry["value"] if entry["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cache(kind: str, key: dict[str, Any], value: Any) -> None:
    """Store a JSON ``value`` under ``key`` atomically, where the folder can be written. Never raises."""
    with contextlib.suppress(OSError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"key": key, "value": value}, indent=1))


def _path(kind: str, key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / kind / f"{name}.json"
