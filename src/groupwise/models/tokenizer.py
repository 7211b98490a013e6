"""Tokenisers: from a folder, from GPT-2's original two files, or from the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.data.torchvision_compat import import_torchvision
from groupwise.errors import UserError
from groupwise.models.hub import first_line, locate
from groupwise.models.sources import find_source

GPT2_FILES = ("encoder.json", "vocab.bpe")
END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name: str) -> Any:
    """The fast tokeniser of ``name``: a transformers folder, one with GPT-2's original files, or a name on the hub.

    Raises:
        UserError: nothing of the kind there; the hub cannot be reached.
    """
    import_torchvision()  # before transformers, which falls without it
    from transformers import AutoTokenizer

    folder = Path(find_source(name))
    if all((folder / file).is_file() for file in GPT2_FILES):
        return gpt2_tokenizer(*read_gpt2(folder))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(locate("model.tokenizer", name), use_fast=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{name} holds no tokeniser that can be read ({first_line(error)}): give model.tokenizer=FOLDER, with a "
            f"transformers tokeniser or GPT-2's {' and '.join(GPT2_FILES)}."
        ) from error
    if not tokenizer.is_fast or len(tokenizer) == 0:
        raise UserError(f"The tokeniser {name} has no tokenizer.json that can be read: save it again, as a fast one.")
    return tokenizer


def read_gpt2(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's vocabulary (token -> id) and its merges, in order, from encoder.json and vocab.bpe."""
    try:
        vocabulary = json.loads((folder / GPT2_FILES[0]).read_text(encoding="utf-8"))
        lines = (folder / GPT2_FILES[1]).read_text(encoding="utf-8").splitlines()
        merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable {' and '.join(GPT2_FILES)} of GPT-2 ({error}).") from error
    return vocabulary, merges


def gpt2_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A fast GPT-2 tokeniser from what `read_gpt2` gives."""
    import_torchvision()
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer(vocab=vocabulary, merges=merges)  # type: ignore[arg-type]
