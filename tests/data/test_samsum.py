"""SAMSum files are read in the instruction format of the paper."""

import json
from pathlib import Path

import pytest

from groupwise.data.text import load_samsum, read_samsum_json
from groupwise.data.text_examples import Request
from tests.data.refusals import refused

ROW = {"id": "7", "summary": "B is late.", "dialogue": "A: where are you?\r\nB: late"}
SOURCE = "Summarize the following dialogue\nA: where are you?\nB: late\nTL;DR"


def write(root: Path, name: str, *rows: dict) -> Path:
    (root / "samsum").mkdir(exist_ok=True)
    (root / "samsum" / name).write_text(json.dumps(rows))
    return root / "samsum" / name


def test_dialogue_is_between_instruction_and_delimiter(tmp_path):
    for name in ("train.json", "val.json", "test.json"):
        write(tmp_path, name, ROW)
    data = load_samsum(tmp_path)
    assert data.train == [(SOURCE, "B is late.")]
    assert data.valid == data.test == [Request(SOURCE, ("B is late.",))]
    assert list(data.sha256) == ["samsum/train.json", "samsum/val.json", "samsum/test.json"]
    assert data.source == "SAMSum, json files (training: train.json)"


def test_equal_dialogues_are_separate_examples(tmp_path):
    for name in ("few.json", "val.json", "test.json"):
        write(tmp_path, name, ROW, ROW | {"id": "8", "summary": "Late."})
    data = load_samsum(tmp_path, "few.json")
    assert len(data.train) == len(data.valid) == len(data.test) == 2
    assert "samsum/few.json" in data.sha256


def test_row_without_a_dialogue_is_dropped_and_counted(tmp_path):
    write(tmp_path, "train.json", ROW, ROW | {"dialogue": " \r\n"})
    write(tmp_path, "val.json", ROW)
    write(tmp_path, "test.json", ROW)
    data = load_samsum(tmp_path)
    assert len(data.train) == 1
    assert data.source.endswith("; 1 rows of train.json without a dialogue dropped")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (ROW | {"summary": " "}, "row 7"),
        ({"id": "7", "summary": "a"}, "row 7"),
        ({"dialogue": "a"}, "row number 1"),
        (ROW | {"dialogue": ["a"]}, "row 7"),
    ],
)
def test_broken_row_is_named(tmp_path, row, name):
    message = refused(read_samsum_json, write(tmp_path, "train.json", ROW, row))
    assert f"{name} lacks a dialogue, or a summary" in message


def test_file_without_any_dialogue_is_refused(tmp_path):
    assert "has no row with a dialogue" in refused(
        read_samsum_json, write(tmp_path, "val.json", ROW | {"dialogue": ""})
    )


def test_real_samsum(real_data):
    data = load_samsum(real_data)
    assert (len(data.train), len(data.valid), len(data.test)) == (14_731, 818, 819)
    assert not any("\r" in source or "\r" in target for source, target in data.train)
    assert data.source == "SAMSum, json files (training: train.json)"
