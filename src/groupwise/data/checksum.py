"""Fingerprints of what was read, for a run's record."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256_of_files(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """Hash whole files: {path relative to `root`: SHA-256 in hex}, in the order given."""
    digests = {}
    for path in paths:
        with path.open("rb") as stream:
            digests[path.relative_to(root).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def sha256_of_bytes(*chunks: bytes) -> str:
    """Hash the concatenation of byte strings: SHA-256 in hex."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
