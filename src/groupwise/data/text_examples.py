"""What a language task trains and is judged on: labelled texts, and pairs of a source and its targets."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from groupwise.data.checksum import sha256_of_bytes

Texts = tuple[str, str | None]
"""A sentence, or a pair of sentences."""


@dataclass(frozen=True)
class Labelled:
    """N texts and their labels, 0 to the number of classes - 1."""

    texts: list[Texts]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabelledText:
    """A classification task. One training text is the unit of privacy.

    Attributes:
        train: the training set.
        valid: validation sets by name, the first one under ""; MNLI has "mismatched" too.
        classes: the classes' names, by label.
        source: where it was found, and what was left out, in words.
        sha256: SHA-256 in hex of each file that was read, by its path under the root.
    """

    train: Labelled
    valid: dict[str, Labelled]
    classes: tuple[str, ...]
    source: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Request:
    """One input, and all texts that people wrote for it."""

    source: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class PairedText:
    """A task of generation.

    Attributes:
        train: (source, target). One pair, a row of the file, is one example and the unit of privacy; sources repeat.
        valid: requests for validation.
        test: requests for testing.
        source: where it was found, and what was left out, in words.
        sha256: SHA-256 in hex of each file that was read, by its path under the root.
    """

    train: list[tuple[str, str]]
    valid: list[Request]
    test: list[Request]
    source: str
    sha256: dict[str, str]


def by_source(pairs: Iterable[tuple[str, str]]) -> list[Request]:
    """Gather the targets of equal sources, in the order in which each source comes first."""
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    return [Request(source, tuple(references)) for source, references in targets.items()]


def sha256_of_examples(examples: object) -> str:
    """Fingerprint of examples (lists, strings, numbers) that lie in no file of ours: SHA-256 of their JSON, in hex."""
    return sha256_of_bytes(json.dumps(examples, ensure_ascii=False).encode())
