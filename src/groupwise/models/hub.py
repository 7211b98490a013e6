"""Finds where `from_pretrained` takes a name from (a folder, the hub, its cache), and loads or makes tokenisers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import groupwise
from groupwise.data.cifar10 import import_torchvision
from groupwise.errors import UserError, reason

PATIENCE = 5.0
"""Seconds that the hub has to answer; transformers itself would go on asking for half a minute."""


def locate(key: str, name: str) -> str:
    """What to hand to `from_pretrained`: a folder, or a name that the hub has just shown to know.

    A name that is no folder is asked for at the hub, once; where the hub cannot be reached, its cache will do.

    Args:
        key: the key of the configuration that holds `name`, for messages.
        name: a folder, or a name on the hub.

    Raises:
        UserError: no such folder, and no such name on the hub or no hub.
    """
    place = find_source(name)
    if Path(place).is_dir():
        return place
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    mend = f"give {key}=FOLDER, one that save_pretrained wrote"
    try:
        get_hf_file_metadata(hf_hub_url(place, "config.json"), timeout=PATIENCE)
    except HFValidationError as error:
        raise UserError(f"{key}={name} is no folder, and no name on the hub is spelt like that: {mend}.") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UserError(
            f"{key}={name} is no folder, and the hub shows no model of that name without a login: {mend}."
        ) from error
    except Exception as error:  # whatever networks do
        cached = try_to_load_from_cache(place, "config.json")
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise UserError(
            f"{key}={name} is no folder, and the hub cannot be reached ({reason(error)}): {mend}, or "
            "model.fresh=true with model.architecture for random weights."
        ) from error
    return place


def find_source(name: str) -> str:
    """A folder as it is named, else that folder below the checkout (``pretrained/gpt2_mini``), else the name itself.

    What is returned as it came is a name on the Hugging Face hub, or in its local cache.
    """
    checkout = Path(groupwise.__file__).resolve().parents[2]
    for folder in (Path(name).expanduser(), checkout / name):
        if folder.is_dir():
            return str(folder)
    return name


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
    place = locate("model.tokenizer", name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place, use_fast=True, trust_remote_code=False)
        tokenizer(["A text."])  # settings of a wrong type show only now
    except Exception as error:  # tokenizers raises bare ones
        raise UserError(
            f"{name} holds no tokeniser that can be read ({reason(error)}): give model.tokenizer=FOLDER, with a "
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
        if not all(isinstance(number, int) for number in vocabulary.values()):
            raise ValueError("tokens are numbered with whole numbers")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder} has no readable {' and '.join(GPT2_FILES)} of GPT-2 ({reason(error)}): copy them anew."
        ) from error
    return vocabulary, merges


def gpt2_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A fast GPT-2 tokeniser from what `read_gpt2` gives; raises `UserError` where the two do not match."""
    import_torchvision()
    from transformers import GPT2Tokenizer

    try:
        return GPT2Tokenizer(vocab=vocabulary, merges=merges)  # type: ignore[arg-type]
    except Exception as error:  # tokenizers raises bare ones
        raise UserError(
            f"GPT-2's {' and '.join(GPT2_FILES)} do not go together ({reason(error)}): copy both."
        ) from error


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
        print(f"usage: python -m groupwise.models.hub FOLDER OUT\n\n{__doc__}", file=sys.stderr)
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
