"""Names the folder for results that take long to compute and can be computed again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$GROUPWISE_CACHE``, else ``$XDG_CACHE_HOME/groupwise``, else ``~/.cache/groupwise``."""
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("GROUPWISE_CACHE") or f"{shared}/groupwise")
