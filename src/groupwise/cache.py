"""A small on-disk cache of calibrated noise multipliers: a search of seconds is done once."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return ``$GROUPWISE_CACHE``, else ``$XDG_CACHE_HOME/groupwise``, else ``~/.cache/groupwise``."""
    if own := os.environ.get("GROUPWISE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "groupwise"
    return Path(os.path.expanduser("~")) / ".cache" / "groupwise"


def read_cache(key: dict[str, Any]) -> Any | None:
    """Return the value stored under ``key``, or None when it is absent, broken or unreadable. Never raises."""
    try:
        entry = json.loads(_path(key).read_text())
        # The key is stored beside the value: a truncated file or a colliding name is a miss, not an answer.
        return entry["value"] if entry["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cache(key: dict[str, Any], value: Any) -> None:
    """Store a JSON ``value`` under ``key`` atomically; a folder that cannot be written is passed over. Never raises."""
    with contextlib.suppress(OSError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"key": key, "value": value}, file, indent=1)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _path(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "noise_multiplier" / f"{name}.json"
