"""GLUE's tsv files are read by the names in their header, with the labels of the hub; dropped rows are reported."""

import time
from pathlib import Path

import pytest

from groupwise.data.glue import GLUE, load_glue, read_glue_tsv
from groupwise.errors import UserError

MNLI_COLUMNS = ("index", "promptID", "pairID", "genre", "b1", "b2", "p1", "p2", "sentence1", "sentence2", "label1")


def write(path: Path, *rows: tuple[str, ...], ending: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join("\t".join(row) + ending for row in rows).encode())
    return path


def sst2(root: Path, folder: str = "glue/SST-2") -> Path:
    write(root / folder / "train.tsv", ("sentence", "label"), ('a "fine film ', "1"), ("dull", "0"), ("warm ", "1"))
    write(root / folder / "dev.tsv", ("sentence", "label"), ("bleak ", "0"))
    return root


def mnli_row(first: str, second: str, label: str, columns: int) -> tuple[str, ...]:
    before = ("0", "1", "1e", "fiction", "( a )", "( b )", "(R a)", "(R b)")
    return (*before, first, second, *["-"] * (columns - 11), label)


def mnli_header(columns: int) -> tuple[str, ...]:
    return (*MNLI_COLUMNS, *(f"label{i}" for i in range(2, columns - 10)), "gold_label")


def test_sst2_is_read_without_quoting_and_stripped(tmp_path):
    data = load_glue("sst2", sst2(tmp_path), hub="none")
    assert data.train.texts == [('a "fine film', None), ("dull", None), ("warm", None)]
    assert data.train.labels == [1, 0, 1] and len(data.train) == 3
    assert data.valid[""].texts == [("bleak", None)] and data.valid[""].labels == [0]
    assert data.classes == ("negative", "positive")
    assert data.source == "GLUE SST-2, tsv files (training: train.tsv)"


def test_qqp_drops_incomplete_rows_of_its_published_file(tmp_path):
    header = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    rows = [header, ("1", "2", "3", "a?", "b?", "0"), ("", "half a row?", "0"), ("4", "5", "6", "c?", "c!", "1")]
    write(tmp_path / "QQP" / "train.tsv", *rows)
    write(tmp_path / "QQP" / "dev.tsv", *rows[:2])
    data = load_glue("qqp", tmp_path, hub="none")
    assert data.train.texts == [("a?", "b?"), ("c?", "c!")] and data.train.labels == [0, 1]
    assert data.source.endswith("; 1 incomplete rows of train.tsv dropped")


def test_mnli_has_two_validation_sets_and_drops_rows_without_gold_label(tmp_path):
    for name, columns in (("train", 12), ("dev_matched", 16), ("dev_mismatched", 16)):
        labels = ["entailment", "neutral", "contradiction"] + ["-"] * (name == "dev_matched")
        rows = [mnli_row(name, f"h{i}", label, columns) for i, label in enumerate(labels)]
        write(tmp_path / "MNLI" / f"{name}.tsv", mnli_header(columns), *rows)
    data = load_glue("mnli", tmp_path, hub="none")
    assert data.train.labels == [0, 1, 2] and data.train.texts[2] == ("train", "h2")
    assert list(data.valid) == ["", "mismatched"]
    assert data.valid[""].texts[0][0] == "dev_matched" and data.valid["mismatched"].texts[0][0] == "dev_mismatched"
    assert data.source.endswith("; 1 rows without an agreed label of dev_matched.tsv dropped")


def test_train_file_option_names_another_file(tmp_path):
    sst2(tmp_path)
    write(tmp_path / "glue/SST-2/small.tsv", ("sentence", "label"), ("ok", "1"))
    data = load_glue("sst2", tmp_path, hub="none", train_file="small.tsv")
    assert data.train.texts == [("ok", None)]
    assert "glue/SST-2/small.tsv" in data.sha256 and "glue/SST-2/train.tsv" not in data.sha256
    with pytest.raises(UserError, match=r"dev.tsv is the training file and one to evaluate on"):
        load_glue("sst2", tmp_path, hub="none", train_file="dev.tsv")


@pytest.mark.parametrize("missing", ["train.tsv", "dev.tsv"])
def test_missing_file_is_named_and_the_hub_not_used(tmp_path, missing, monkeypatch):
    import groupwise.data.glue as glue_hub

    monkeypatch.setattr(glue_hub, "load_from_hub", lambda *_: pytest.fail("the hub was asked"))
    (sst2(tmp_path) / "glue/SST-2" / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} is missing; .*data.train_file"):
        load_glue("sst2", tmp_path, hub="none")


def test_train_file_without_its_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.train_file=x.tsv was given, but its folder .*glue/SST-2 is missing"):
        load_glue("sst2", tmp_path, hub="none", train_file="x.tsv")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"sentence\tlabels\ngood\t1\n", r"not a tab-separated table with the columns sentence, label.*\['label'\]"),
        (b"sentence\tlabel\ngood\t1\nbad\n", "line 3 has the label ''"),
        *(
            (f"sentence\tlabel\ngood\t{label}\n".encode(), f"line 2 has the label '{label}'")
            for label in ("2", "", "-")
        ),
        (b"sentence\tlabel\n", "has no example"),
        ("sentence\tlabel\ncaf\u00e9\t1\n".encode("latin-1"), "is not UTF-8"),
    ],
)
def test_broken_file_is_named_with_its_line(tmp_path, content, words):
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_glue_tsv(tmp_path / "dev.tsv", GLUE["sst2"])
    assert "\n" not in str(caught.value) and str(tmp_path / "dev.tsv") in str(caught.value)


def test_real_sst2_is_read_in_less_than_a_second(real_data):
    start = time.process_time()
    data = load_glue("sst2", real_data, hub="none")
    assert time.process_time() - start < 1.0
    assert (len(data.train), len(data.valid[""])) == (67_349, 872)
    assert (data.train.labels.count(0), data.train.labels.count(1)) == (29_780, 37_569)
    assert data.valid[""].texts[0] == ("it 's a charming and often affecting journey .", None)


def test_real_qqp_and_mnli(real_data):
    folder = real_data / "glue"
    qqp, dropped = read_glue_tsv(folder / "QQP/dev.tsv", GLUE["qqp"])
    assert (len(qqp), qqp.labels.count(0), dropped) == (40_430, 25_545, 0)
    for name, count in (("matched", 9_815), ("mismatched", 9_832)):
        part, dropped = read_glue_tsv(folder / f"MNLI/dev_{name}.tsv", GLUE["mnli"])
        assert (len(part), dropped, set(part.labels)) == (count, 0, {0, 1, 2})
