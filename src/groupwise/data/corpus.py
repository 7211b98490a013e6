"""Reads public text for pretraining: text files, split into documents at blank lines, and files of tables and texts."""

import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.data.table_to_text import read_dart_json, read_e2e_csv
from groupwise.data.text_examples import sha256_of_files
from groupwise.errors import UserError, reason

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
