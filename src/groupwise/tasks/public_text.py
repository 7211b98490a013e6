"""Tells which public texts a model's weights and vocabulary were made from, and refuses those that are private now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason
from groupwise.models.hub import find_source
from groupwise.models.vocabulary import RECORD

PROVENANCE = "provenance.json"


def public_text(config: RunConfig, private: Iterable[str]) -> str:
    """In words, from what lies beside the weights and the tokeniser; empty where nothing says it, as on the hub.

    Args:
        config: the run's.
        private: SHA-256 in hex of the training files.

    Raises:
        UserError: one of those is among the public files, and this run claims to protect it; a broken record.
    """
    weights = None if config.model.fresh else config.model.source
    vocabulary = config.model.tokenizer or config.model.source
    found = {
        "vocabulary": _digests(vocabulary, RECORD, ()),
        "weights": _digests(weights, PROVENANCE, ("data",)),
    }
    secret = set(private)
    for part, files in found.items():
        for name in (name for name, digest in files.items() if digest in secret and config.clip.grouping != "none"):
            raise UserError(
                f"The {part} of model.source={config.model.source} were made from {name}, which this run is to keep "
                "private: start from other public text (model.source), or from random weights (model.fresh=true) with "
                "another model.tokenizer."
            )
    told = [f"{part} from {', '.join(Path(name).name for name in files)}" for part, files in found.items() if files]
    return "; ".join(told)


def _digests(source: str | None, name: str, trail: tuple[str, ...]) -> Mapping[str, str]:
    """{file: SHA-256} of a record beside a model; nothing where there is none."""
    if source is None or not (file := Path(find_source(source)) / name).is_file():
        return {}
    try:
        held: Any = json.loads(file.read_text(encoding="utf-8"))
        for key in trail:
            held = held.get(key, {})
        digests = held.get("sha256", {})
        return {str(file): str(digest) for file, digest in digests.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({reason(error)}): restore it, or remove the folder.") from error
