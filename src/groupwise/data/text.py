"""Chooses among a task's texts (a held-out share, a smaller set), and reads public text to pretrain on.

Public text is text files, split into documents at blank lines, and files of tables and texts.
"""

import gzip
import lzma
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from groupwise.data.paired_text import read_dart_json, read_e2e_csv
from groupwise.data.text_examples import Labelled, LabelledText, PairedText, by_source, keyed_fraction, sha256_of_files
from groupwise.errors import UserError, reason

Data = TypeVar("Data", LabelledText, PairedText)


def hold_out(data: Data, share: float, seed: int = 0) -> Data:
    """Set a random `share` of the training set aside, and validate on it instead; for tuning (0.2 in appendix A.2).

    The split is fixed by `seed`, and what remains keeps its order. Labelled rows are chosen by their number alone,
    exactly `share` of them. Where texts are paired, whole sources are, each by its own text alone, so that no source is
    on both sides and no row decides on which side another one's source is; they make up about the share. The test set
    stays as it is; of several validation sets only the new one is left.

    Raises:
        UserError: a share that leaves one of the two sides empty.
    """
    count = len(data.train)
    wanted = round(share * count)
    if not 0 < wanted < count:
        raise UserError(f"data.holdout={share} of {count} training examples leaves one side empty; give 0.2, say.")
    source = f"{data.source}; {share:g} of the training set held out to validate on (seed {seed})"
    if isinstance(data, LabelledText):
        held = set(_order(count, seed)[:wanted])
        rest = [i for i in range(count) if i not in held]
        return replace(data, train=_rows(data.train, rest), valid={"": _rows(data.train, sorted(held))}, source=source)
    requests = by_source(data.train)
    sources = {request.source for request in requests if keyed_fraction(request.source, seed) < share}
    if not 0 < len(sources) < len(requests):
        raise UserError(
            f"data.holdout={share} leaves no source to train on, or none to validate on, of {len(requests)}: give "
            "another share, or leave it out."
        )
    return replace(
        data,
        train=[pair for pair in data.train if pair[0] not in sources],
        valid=[request for request in requests if request.source in sources],
        source=source,
    )


def keep(data: Data, limit: int, seed: int = 0) -> Data:
    """Keep a random choice of `limit` training examples, fixed by `seed`, in their order; fewer are part of more.

    It goes by the rows' numbers, and never looks at what is in them.

    Raises:
        UserError: a limit below 1.
    """
    count = len(data.train)
    if limit < 1:
        raise UserError(f"data.train_limit={limit} leaves no example: give at least 1, or null for all.")
    if limit >= count:
        return data
    chosen = sorted(_order(count, seed)[:limit])
    source = f"{data.source}; {limit:,} of {count:,} training examples kept (seed {seed})"
    if isinstance(data, LabelledText):
        return replace(data, train=_rows(data.train, chosen), source=source)
    return replace(data, train=[data.train[i] for i in chosen], source=source)


def _order(count: int, seed: int) -> list[int]:
    """0..count - 1 shuffled, the same on every machine."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _rows(part: Labelled, rows: list[int]) -> Labelled:
    return Labelled([part.texts[i] for i in rows], [part.labels[i] for i in rows])


ENDINGS = (".txt", ".txt.gz", ".txt.xz")
MAX_CHARACTERS = 4000

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of the files: pieces of at most `MAX_CHARACTERS` characters, or tables with their texts.

    Attributes:
        documents: pieces of text files, pairs of the others.
        source: what was read, in words.
        sha256: SHA-256 in hex of each file, by its folder and name.
    """

    documents: list[str]
    source: str
    sha256: dict[str, str]


def read_corpus(paths: Sequence[Path], end: str = "\n") -> Corpus:
    """Read text files (.txt, or that compressed as .gz or .xz), folders of them, sorted by name, or files of pairs.

    The text is cut at blank lines: paragraphs that follow each other are joined to a document as long as they fit into
    `MAX_CHARACTERS`, and only a paragraph that is longer is cut itself, at a blank where there is one. A .json file is
    read as DART's and a .csv file as E2E's: each table with one of its texts is a document, as `task=dart` and
    `task=e2e` lay them out.

    Args:
        paths: files and folders; in a folder only text files count.
        end: the tokeniser's end of text, which stands between a table and its text.

    Raises:
        UserError: nothing there, no text file in a folder, a broken file, no UTF-8, or no text at all.
    """
    documents: list[str] = []
    sha256: dict[str, str] = {}
    for path in paths:
        files = _files(path)
        for file in files:
            documents += [f"{table}{end} {text}" for table, text in _pairs(file)] or split_documents(_read(file))
        sha256 |= sha256_of_files(files, path.parent)
    if not documents:
        raise UserError(f"{', '.join(map(str, paths))} holds no text; give files with some (data.corpus).")
    return Corpus(documents, f"text files ({', '.join(Path(name).name for name in sha256)})", sha256)


def split_documents(text: str, max_characters: int = MAX_CHARACTERS) -> list[str]:
    """Cut a text into documents of at most `max_characters`; no character but blanks around the cuts is lost."""
    documents: list[str] = []
    gathered: list[str] = []
    size = 0
    for paragraph in _BLANK_LINES.split(text.replace("\r\n", "\n")):
        for piece in _pieces(paragraph.strip(), max_characters):
            if gathered and size + 2 + len(piece) > max_characters:
                documents.append("\n\n".join(gathered))
                gathered, size = [], 0
            size += len(piece) + (2 if gathered else 0)
            gathered.append(piece)
    if gathered:
        documents.append("\n\n".join(gathered))
    return documents


def _pieces(paragraph: str, max_characters: int) -> Iterator[str]:
    """The paragraph, or cuts of it where it is too long; nothing where it is empty."""
    while len(paragraph) > max_characters:
        cut = max(paragraph.rfind(blank, 0, max_characters) for blank in " \n")
        cut = cut if cut > 0 else max_characters
        yield paragraph[:cut].rstrip()
        paragraph = paragraph[cut:].lstrip()
    if paragraph:
        yield paragraph


def _files(path: Path) -> list[Path]:
    """The file itself, or the text files of the folder by name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is missing; put text files (.txt, .txt.gz, .txt.xz) there, or give data.corpus=PATH.")
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(ENDINGS))
    if not files:
        raise UserError(
            f"{path} holds no text file; put .txt, .txt.gz or .txt.xz files there, or give data.corpus=PATH."
        )
    return files


def _pairs(file: Path) -> list[tuple[str, str]]:
    """(table, text) of a file of DART or E2E; nothing of a text file."""
    if file.suffix == ".json":
        return [(entry.source, text) for entry in read_dart_json(file) for text in entry.references]
    return read_e2e_csv(file) if file.suffix == ".csv" else []


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        elif file.suffix == ".xz":
            content = lzma.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}); convert or replace the file.") from error
    except (OSError, EOFError, MemoryError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{file} cannot be read ({reason(error)}); it may be truncated, so replace it.") from error
