"""The mini models' tokenisers: GPT-2's byte-pair encoding, its first merges only.

    python -m groupwise.models.mini_tokenizers FOLDER OUT     # FOLDER holds GPT-2's encoder.json and vocab.bpe

Merges are ranked, so the first M of them are a byte-pair encoding of their own, with 256 + M tokens, each under its
GPT-2 id. With M = 8,000 texts grow by 15 to 20 %, while the softmax and the embedding, most of a small model, shrink
sixfold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from groupwise.data.torchvision_compat import import_torchvision
from groupwise.errors import UserError
from groupwise.models.tokenizer import END_OF_TEXT, gpt2_tokenizer, read_gpt2

MERGES = 8000
BYTES = 256


def first_merges(folder: Path, count: int = MERGES) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's tokens below 256 + ``count``, under their own ids, and the merges that make them."""
    vocabulary, merges = read_gpt2(folder)
    if not 0 < count <= len(merges):
        raise UserError(f"{count} merges were asked for, but {folder} has {len(merges)}: take 1 to {len(merges)}.")
    return {token: number for token, number in vocabulary.items() if number < BYTES + count}, merges[:count]


def mini_gpt2(folder: Path, count: int = MERGES) -> Any:
    """GPT-2's tokeniser with its first merges, <|endoftext|> last."""
    vocabulary, merges = first_merges(folder, count)
    return gpt2_tokenizer({**vocabulary, END_OF_TEXT: BYTES + count}, merges)


def mini_roberta(folder: Path, count: int = MERGES) -> Any:
    """The same tokens as RoBERTa frames them: <s>, <pad>, </s>, <unk> first (GPT-2's ids + 4), <mask> last."""
    vocabulary, merges = first_merges(folder, count)
    special = ("<s>", "<pad>", "</s>", "<unk>")
    numbered = {token: number for number, token in enumerate(special)}
    numbered |= {token: number + len(special) for token, number in vocabulary.items()}
    numbered["<mask>"] = len(numbered)
    import_torchvision()
    from transformers import RobertaTokenizer

    return RobertaTokenizer(vocab=numbered, merges=merges)  # type: ignore[arg-type]


def main(arguments: list[str]) -> int:
    """Write OUT/gpt2_mini and OUT/roberta_mini; returns the exit code."""
    if len(arguments) != 2:
        print(f"usage: python -m groupwise.models.mini_tokenizers FOLDER OUT\n\n{__doc__}", file=sys.stderr)
        return 2
    folder, out = map(Path, arguments)
    try:
        mini_gpt2(folder).save_pretrained(out / "gpt2_mini")
        mini_roberta(folder).save_pretrained(out / "roberta_mini")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
