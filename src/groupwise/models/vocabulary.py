"""Trains a small byte-pair vocabulary on public texts, and writes it as a tokeniser with the texts' fingerprints.

    python -m groupwise.models.vocabulary OUT SIZE TEXT...

The private texts are not used: a vocabulary counted from them would reveal their words, outside of any epsilon.
"""

import json
import sys
from pathlib import Path
from typing import Any

from groupwise.atomic import write_json
from groupwise.data.text import Corpus, read_corpus
from groupwise.errors import UserError, command
from groupwise.models.hub import BYTES, END_OF_TEXT, gpt2_tokenizer

RECORD = "vocabulary.json"
"""Beside the tokeniser: its size, and the SHA-256 of each file that it was trained on."""


def train_vocabulary(corpus: Corpus, size: int) -> Any:
    """A tokeniser like GPT-2's with `size` tokens, <|endoftext|> last: the same bytes for the same texts.

    Byte-pair encoding (Sennrich et al., 2016) on bytes, by the tokenizers library; every byte is a token, so no text is
    unknown.

    Raises:
        UserError: a size without room for a merge, or larger than the texts give.
    """
    from tokenizers import ByteLevelBPETokenizer

    if size <= BYTES + 1:
        raise UserError(f"A vocabulary of {size} holds only bytes and the end of text: give more than {BYTES + 1}.")
    trainer = ByteLevelBPETokenizer()
    texts = (part for document in corpus.documents for part in document.split(END_OF_TEXT))
    trainer.train_from_iterator(texts, vocab_size=size - 1, min_frequency=2, show_progress=False)
    found = json.loads(trainer.to_str())["model"]
    if len(found["vocab"]) != size - 1:
        raise UserError(
            f"The texts give a vocabulary of {len(found['vocab']) + 1}, but {size} was asked for: give more text."
        )
    return gpt2_tokenizer({**found["vocab"], END_OF_TEXT: size - 1}, [tuple(merge) for merge in found["merges"]])


def write_vocabulary(folder: Path, size: int, texts: list[Path]) -> bool:
    """Train on texts (see `read_corpus`) and write the tokeniser unless it exists; returns whether it did so."""
    corpus = read_corpus(texts, END_OF_TEXT)
    record = {"tokens": size, "sha256": corpus.sha256}
    if (folder / RECORD).is_file() and json.loads((folder / RECORD).read_text(encoding="utf-8")) == record:
        return False
    train_vocabulary(corpus, size).save_pretrained(folder)
    write_json(folder / RECORD, record)
    return True


@command
def main(arguments: list[str]) -> int:
    """Write OUT; returns the exit code."""
    if len(arguments) < 3 or not arguments[1].isdecimal():
        print(f"usage: python -m groupwise.models.vocabulary OUT SIZE TEXT...\n\n{__doc__}", file=sys.stderr)
        return 2
    made = write_vocabulary(Path(arguments[0]), int(arguments[1]), list(map(Path, arguments[2:])))
    print(f"{arguments[0]}: {'written' if made else 'already made of these texts'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
