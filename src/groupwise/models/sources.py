"""Where a model or tokeniser named in a configuration is found: a folder, or the hub."""

from __future__ import annotations

from pathlib import Path

import groupwise


def find_source(name: str) -> str:
    """A folder as it is named, else that folder below the checkout (``pretrained/gpt2_mini``), else the name itself.

    What is returned as it came is a name on the Hugging Face hub, or in its local cache.
    """
    checkout = Path(groupwise.__file__).resolve().parents[2]
    for folder in (Path(name).expanduser(), checkout / name):
        if folder.is_dir():
            return str(folder)
    return name
