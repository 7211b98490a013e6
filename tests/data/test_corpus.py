"""Text files become documents; nothing of the text is lost."""

import gzip
import hashlib
import json
import lzma
import os
import re
from pathlib import Path

import pytest

from groupwise.data.text import MAX_CHARACTERS, read_corpus, split_documents
from groupwise.errors import UserError


def refused(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_corpus(paths)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_paragraphs_are_kept_whole_and_joined_as_long_as_they_fit():
    assert split_documents("aaaa\nbb\n\ncc\n \t\n\ndddd\n", 11) == ["aaaa\nbb\n\ncc", "dddd"]
    assert split_documents("aaaa\nbb\n\ncc\n\ndddd", 10) == ["aaaa\nbb", "cc\n\ndddd"]


def test_a_long_paragraph_is_cut_at_blanks():
    assert split_documents("one two three\nfour", 9) == ["one two", "three", "four"]
    assert split_documents("abcdefghij", 4) == ["abcd", "efgh", "ij"]


def test_only_blanks_are_lost_and_no_document_is_too_long():
    text = "\r\n\r\n".join("word " * (7 * number % 90) + f"end {number}." for number in range(400))
    documents = split_documents(text, 200)
    assert max(map(len, documents)) <= 200 and all(document.strip() == document != "" for document in documents)
    assert re.sub(r"\s+", "", "".join(documents)) == re.sub(r"\s+", "", text)
    assert sum(map(len, documents)) / len(documents) > 120  # well filled


def test_a_folder_is_read_in_order_with_its_compressed_files(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "b.txt").write_text("second\n")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (folder / "c.txt.xz").write_bytes(lzma.compress("thïrd".encode()))
    (folder / "readme.md").write_text("no text of the corpus")
    corpus = read_corpus([folder])
    assert corpus.documents == ["first", "second", "thïrd"]
    assert list(corpus.sha256) == ["corpus/a.txt.gz", "corpus/b.txt", "corpus/c.txt.xz"]
    assert corpus.sha256["corpus/b.txt"] == hashlib.sha256(b"second\n").hexdigest()
    assert corpus.source == "text files (a.txt.gz, b.txt, c.txt.xz)"


def test_tables_with_their_texts_are_documents_in_the_form_of_fine_tuning(tmp_path):
    (tmp_path / "a.csv").write_text('mr,ref\n"name[A], area[B]",A is in B.\n')
    entry = {"tripleset": [["A", "IN", "B"]], "annotations": [{"text": "A lies in B."}, {"text": "B has A."}]}
    (tmp_path / "b.json").write_text(json.dumps([entry]))
    (tmp_path / "c.txt").write_text("text")
    corpus = read_corpus([tmp_path / name for name in ("a.csv", "b.json", "c.txt")], "<end>")
    assert corpus.documents == [
        "name : A | area : B<end> A is in B.",
        "A : in : B<end> A lies in B.",
        "A : in : B<end> B has A.",
        "text",
    ]
    assert read_corpus([tmp_path]).documents == ["text"], "of a folder its text files alone"
    (tmp_path / "b.json").write_text("[]")
    assert "does not hold a list of objects" in refused(tmp_path / "b.json")


def test_what_is_not_there_is_told(tmp_path):
    assert "corpus is missing" in refused(tmp_path / "corpus")
    (tmp_path / "corpus").mkdir()
    assert "holds no text file" in refused(tmp_path / "corpus")
    (tmp_path / "corpus" / "a.txt").write_text(" \n\n ")
    assert "holds no text;" in refused(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9", "is not UTF-8"),
        ("a.txt.xz", lzma.compress(b"text" * 999)[:-20], "cannot be read"),
        ("a.txt.xz", b"no xz", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-20], "cannot be read"),
        ("a.txt.gz", b"no gz", "cannot be read"),
    ],
    ids=["not UTF-8", "xz cut short", "not xz", "gz cut short", "not gz"],
)
def test_a_broken_file_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path)
    assert words in message and name in message


def test_a_real_file():
    if "GROUPWISE_DATA" not in os.environ:
        pytest.skip("GROUPWISE_DATA (a folder with corpus/) is not set")
    path = Path(os.environ["GROUPWISE_DATA"]) / "corpus" / "sgd_dialogues.txt.xz"
    documents = read_corpus([path]).documents
    assert sum(document.count("\n\n") + 1 for document in documents) == 17_193  # dialogues, none of them cut
    assert max(map(len, documents)) <= MAX_CHARACTERS
