"""A close match for a misspelt word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], in_full: Mapping[str, str] | None = None) -> str:
    """`` (did you mean X?)``, X the known word close to ``word`` or its ``in_full``; empty if none is."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {(in_full or {}).get(close[0], close[0])}?)" if close else ""
