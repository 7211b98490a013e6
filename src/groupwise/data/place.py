"""Places a row among all rows by what is in it and a public key alone: the hash behind `data.holdout`."""

import hashlib


def place_of(content: str | bytes, key: int) -> float:
    """A place in [0, 1): like a uniform draw, but the same on every machine; no other row has a part in it.

    Equal contents have equal places, so copies of a row are never on both sides of a split.
    """
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(f"{key}\n".encode() + raw).digest()[:8]) / 2**64
