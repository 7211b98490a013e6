"""E2E and DART files are read, and their tables written as one line."""

import hashlib
import json
from pathlib import Path

import pytest

from groupwise.data.text import linearise_mr, load_dart, load_e2e, read_dart_json, read_e2e_csv
from groupwise.data.text_examples import Request
from groupwise.errors import UserError
from tests.data.refusals import refused

MR = "name[The Mill], eatType[pub], area[riverside], familyFriendly[yes]"
LINEAR = "name : The Mill | Type : pub | area : riverside | family friendly : yes"


def e2e(root: Path, train: str = "trainset.csv") -> Path:
    folder = root / "e2e"
    folder.mkdir()
    (folder / train).write_text(f'mr,ref\n"{MR}",A pub.\n"{MR}","The Mill, a pub. "\n')
    (folder / "devset.csv").write_text(f'mr,ref\n"{MR}",One\nname[X],Two\n"{MR}",Three\n')
    (folder / "testset_w_refs.csv").write_text('"MR","ref"\n"name[Y], near[Café Z]","Four"\n')
    return root


def entry(*triples: tuple[str, ...], texts: tuple[str, ...] = ("A text.",)) -> dict:
    return {"tripleset": [list(triple) for triple in triples], "annotations": [{"text": text} for text in texts]}


def dart(root: Path, test: str = "dart-v1.1.1-full-test.json", train: str = "dart-v1.1.1-full-train.json") -> Path:
    folder = root / "dart"
    folder.mkdir()
    two = entry(("Mars", "MOON", "Deimos"), ("Mars", "Colour", "red"), texts=("Mars is red.", " Red Mars. "))
    (folder / train).write_text(json.dumps([two, entry(("A", "b", "C"))]))
    (folder / "dart-v1.1.1-full-dev.json").write_text(json.dumps([two, two]))
    (folder / test).write_text(json.dumps([entry(("A", "b", "C"), texts=("", "x"))]))
    return root


def test_mr_becomes_names_and_values():
    assert linearise_mr(MR) == LINEAR
    long = "name[A], eatType[b], food[C], priceRange[less than £20], customer rating[5 out of 5], near[Café D]"
    assert linearise_mr(long) == (
        "name : A | Type : b | food : C | price : less than £20 | customer rating : 5 out of 5 | near : Café D"
    )


def test_e2e_trains_on_rows_and_evaluates_each_mr_once(tmp_path):
    data = load_e2e(e2e(tmp_path))
    assert data.train == [(LINEAR, "A pub."), (LINEAR, "The Mill, a pub.")]
    assert data.valid == [Request(LINEAR, ("One", "Three")), Request("name : X", ("Two",))]
    assert data.test == [Request("name : Y | near : Café Z", ("Four",))]
    assert list(data.sha256) == ["e2e/trainset.csv", "e2e/devset.csv", "e2e/testset_w_refs.csv"]
    assert data.sha256["e2e/devset.csv"] == hashlib.sha256((tmp_path / "e2e/devset.csv").read_bytes()).hexdigest()


def test_e2e_reads_the_reconstructed_or_a_named_training_file(tmp_path):
    assert "trainset.reconstructed.csv" in load_e2e(e2e(tmp_path, "trainset.reconstructed.csv")).source
    (tmp_path / "e2e" / "small.csv").write_text("mr,ref\nname[A],b\n")
    data = load_e2e(tmp_path, "small.csv")
    assert data.train == [("name : A", "b")] and "e2e/small.csv" in data.sha256


def test_missing_e2e_folder_names_the_expected_files(tmp_path):
    with pytest.raises(UserError, match=r"e2e/trainset.csv is missing; put .*devset.csv.*paths.data=FOLDER"):
        load_e2e(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,ref\na,b\n", "no column mr"),
        ("mr\nname[A]\n", "no column ref"),
        ("", "is not CSV"),
        ("mr,ref\n", "has no row"),
        ("mr,ref\nname[A],b\nname[A]\n", "row 2 has no ref"),
        ("mr,ref\nname[A],\n", "row 1 has no ref"),
        ("mr,ref\nname A,b\n", "row 1 has no ref, or no mr of slots"),
        ("mr,ref\nname[A] eatType[pub],b\n", "row 1 has no ref, or no mr of slots"),
        ('mr,ref\nname[A],"' + "x" * 200_000, "is not CSV"),
    ],
)
def test_broken_e2e_file_is_refused_with_its_row(tmp_path, text, words):
    (tmp_path / "devset.csv").write_text(text)
    message = refused(read_e2e_csv, tmp_path / "devset.csv")
    assert words in message and "name A" not in message  # training examples must not appear in logs


def test_dart_trains_on_texts_and_evaluates_each_entry_once(tmp_path):
    data = load_dart(dart(tmp_path))
    linear = "Mars : moon : Deimos | Mars : colour : red"
    assert data.train == [(linear, "Mars is red."), (linear, "Red Mars."), ("A : b : C", "A text.")]
    assert data.valid == [Request(linear, ("Mars is red.", "Red Mars."))] * 2
    assert data.test == [Request("A : b : C", ("", "x"))]
    assert list(data.sha256) == [f"dart/dart-v1.1.1-full-{split}.json" for split in ("train", "dev", "test")]


def test_dart_reads_the_converted_test_file_and_a_named_training_file(tmp_path):
    data = load_dart(dart(tmp_path, "dart-v1.1.1-full-test.from_xml.json", "webnlg.json"), "webnlg.json")
    assert len(data.train) == 3 and "dart/dart-v1.1.1-full-test.from_xml.json" in data.sha256
    with pytest.raises(UserError, match=r"dart-v1.1.1-full-train.json is missing; .*data.train_file"):
        load_dart(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        {"annotations": [{"text": "a"}]},
        {"tripleset": [["a", "b", "c"]]},
        {"tripleset": [["a", "b", "c"]], "annotations": []},
        {"tripleset": [["a", "b", "c"]], "annotations": [{"source": "a"}]},
        {"tripleset": [["a", "b", "c"]], "annotations": [{"text": None}]},
        {"tripleset": [["a", "b"]], "annotations": [{"text": "a"}]},
        {"tripleset": [], "annotations": [{"text": "a"}]},
        {"tripleset": None, "annotations": [{"text": "a"}]},
    ],
)
def test_broken_dart_entry_is_refused_with_its_number(tmp_path, broken):
    (tmp_path / "dev.json").write_text(json.dumps([entry(("a", "b", "c")), broken]))
    assert "entry 1 is not of the form tripleset" in refused(read_dart_json, tmp_path / "dev.json")


def test_real_e2e(real_data):
    data = load_e2e(real_data)
    assert len(data.train) == 42_061
    assert (len(data.valid), sum(len(request.references) for request in data.valid)) == (547, 4_672)
    assert (len(data.test), sum(len(request.references) for request in data.test)) == (630, 4_693)
    assert data.valid[0].source == "name : Alimentum | area : city centre | family friendly : no"


def test_real_dart(real_data):
    data = load_dart(real_data, "webnlg2017-train.json")
    assert len(data.train) == 18_102
    assert (len(data.valid), sum(len(request.references) for request in data.valid)) == (2_768, 6_980)
    assert (len(data.test), sum(len(request.references) for request in data.test)) == (5_097, 12_552)
    assert data.valid[0].source == (
        "Mars Hill College : joined : 1973 | Mars Hill College : location : Mars Hill, North Carolina"
    )
