"""Holds and selects the examples of a language task, and reads and hashes files."""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from groupwise.errors import UserError, reason

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
        valid: validation sets by name, the first one under ""; MNLI has "mismatched" too.
        classes: the classes' names, by label.
        source: where the data are from, and what was left out, in words.
        sha256: SHA-256 in hex of each file that was read, by its path below the root.
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
    """A text generation task.

    Attributes:
        train: pairs (source, target). One pair is one example and the unit of privacy; sources may repeat.
        valid, test: requests for validation and for testing.
        source: where the data are from, and what was left out, in words.
        sha256: SHA-256 in hex of each file that was read, by its path below the root.
    """

    train: list[tuple[str, str]]
    valid: list[Request]
    test: list[Request]
    source: str
    sha256: dict[str, str]


def by_source(pairs: Iterable[tuple[str, str]]) -> list[Request]:
    """Group targets by source, in the order of the sources' first occurrence."""
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    return [Request(source, tuple(references)) for source, references in targets.items()]


Data = TypeVar("Data", LabelledText, PairedText)


def hold_out(data: Data, share: float) -> Data:
    """Hold out a random `share` of the training set, and validate on it instead; for tuning (0.2 in appendix A.2).

    The split is always the same, and the remaining rows keep their order. Labelled rows are chosen by their number
    alone, exactly `share` of them. Pairs are chosen by a hash of their source, about `share` of them: pairs with the
    same source stay together, and no row affects the choice of another source. The test set is unchanged; the new
    validation set replaces all others.

    Raises:
        UserError: a share that leaves one of the two sets empty.
    """
    count = len(data.train)
    empty = UserError(f"data.holdout={share} of {count} training examples leaves one set empty; give another share.")
    source = f"{data.source}; {share:g} of the training set held out to validate on (seed 0)"
    if isinstance(data, LabelledText):
        held = sorted(_order(count)[: max(0, round(share * count))])
        rest = sorted(set(range(count)).difference(held))
        if not held or not rest:
            raise empty
        return replace(data, train=_rows(data.train, rest), valid={"": _rows(data.train, held)}, source=source)
    apart = {source for source, _ in data.train if keyed_fraction(source, 0) < share}
    train = [pair for pair in data.train if pair[0] not in apart]
    if not apart or not train:
        raise empty
    valid = [request for request in by_source(data.train) if request.source in apart]
    return replace(data, train=train, valid=valid, source=source)


def keep(data: Data, limit: int) -> Data:
    """Keep `limit` training examples in their order, chosen at random, but always the same.

    A smaller limit keeps a subset of them. The choice depends on the number of a row, never on its content.
    """
    count = len(data.train)
    if limit >= count:
        return data
    chosen = sorted(_order(count)[:limit])
    source = f"{data.source}; {limit:,} of {count:,} training examples kept (seed 0)"
    if isinstance(data, LabelledText):
        return replace(data, train=_rows(data.train, chosen), source=source)
    return replace(data, train=[data.train[i] for i in chosen], source=source)


def _order(count: int) -> list[int]:
    """0..count - 1, shuffled; the same on every machine."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def _rows(part: Labelled, rows: list[int]) -> Labelled:
    return Labelled([part.texts[i] for i in rows], [part.labels[i] for i in rows])


def sha256_of_examples(examples: object) -> str:
    """SHA-256, in hex, of the JSON of examples (lists, strings, numbers) that do not come from a file."""
    return sha256_of_bytes(json.dumps(examples, ensure_ascii=False).encode())


def read_text(path: Path, advice: str) -> str:
    """Read a file as UTF-8, without a byte-order mark; `advice` says what to do if it is missing.

    Raises:
        UserError: no such file, or it is not UTF-8.
    """
    if not path.is_file():  # reading a pipe could block, and a device may never end
        raise UserError(f"{path} is missing; {advice}.")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert or replace the file.") from error
    except (OSError, MemoryError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}); make it readable.") from error


def read_json_list(path: Path, advice: str) -> list[dict[str, Any]]:
    """Read a JSON file that holds a list of objects, at least one.

    Raises:
        UserError: no such file, or it is not JSON of this form.
    """
    text = read_text(path, advice)
    try:
        rows = json.loads(text)
        json.dumps(rows, ensure_ascii=False).encode()
    except (ValueError, RecursionError, MemoryError) as error:  # lone surrogates and thousands of brackets too
        raise UserError(f"{path} is not readable JSON ({reason(error)}); replace it.") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is not a list of objects like the published file; replace it.")
    return rows


def sha256_of_files(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """Hash whole files: {path relative to `root`: SHA-256 in hex}, in the order given; refuses a file given twice."""
    digests: dict[str, str] = {}
    for path in paths:
        if path.relative_to(root).as_posix() in digests:
            raise UserError(f"{path} is the training file and one to evaluate on: give another data.train_file.")
        with path.open("rb") as stream:
            digests[path.relative_to(root).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def sha256_of_bytes(*chunks: bytes) -> str:
    """Hash the concatenation of byte strings: SHA-256 in hex."""
    return hashlib.sha256(b"".join(chunks)).hexdigest()


def keyed_fraction(content: str | bytes, key: int) -> float:
    """A number in [0, 1) that looks uniformly random, but depends on this content and the key alone.

    Equal contents have equal numbers, so a split never separates copies of a row.
    """
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(f"{key}\n".encode() + raw).digest()[:8]) / 2**64
