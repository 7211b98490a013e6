"""GLUE in the layout of the hub is read from a local folder; without a network the error names both options."""

from pathlib import Path

import pytest

from groupwise.data.glue import GLUE, load_glue
from tests.data.refusals import refused

datasets = pytest.importorskip("datasets")
NOWHERE = "http://127.0.0.1:9"  # nothing listens on this port

ROWS = {
    "sst2": {"sentence": ["fine ", "dull", "warm"], "label": [1, 0, 1]},
    "qnli": {"question": ["q?", "r?", "s?"], "sentence": ["a", "b", "c"], "label": [0, 1, 0]},
    "qqp": {"question1": ["q?", "r?", "s?"], "question2": ["a?", "b?", "c?"], "label": [0, 1, 0]},
    "mnli": {"premise": ["p", "q", "r"], "hypothesis": ["a", "b", "c"], "label": [0, 1, 2]},
}


@pytest.fixture(autouse=True)
def own_library_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", NOWHERE)


def hub_folder(root: Path, task: str, rows: dict | None = None, classes: tuple[str, ...] | None = None) -> Path:
    """A folder in the layout of the hub: parquet files for each configuration, and a README that lists them."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows, classes = rows or ROWS[task], classes or GLUE[task].classes
    splits = ["train", *GLUE[task].hub_valid.values()]
    table = pa.table(rows | {"idx": list(range(len(rows["label"])))})
    (root / task).mkdir(parents=True)
    files = []
    for split in splits:
        parquet.write_table(table, root / task / f"{split}-00000-of-00001.parquet")
        files.append({"split": split, "path": f"{task}/{split}-*"})
    names = "".join(f"            '{label}': {name}\n" for label, name in enumerate(classes))
    texts = "".join(f"  - name: {name}\n    dtype: string\n" for name in rows if name != "label")
    (root / "README.md").write_text(
        "---\ndataset_info:\n- config_name: " + task + "\n  features:\n" + texts + "  - name: label\n    dtype:\n"
        "      class_label:\n        names:\n" + names + "  - name: idx\n    dtype: int64\n"
        "configs:\n- config_name: " + task + "\n  data_files:\n"
        + "".join(f"  - split: {file['split']}\n    path: {file['path']}\n" for file in files)
        + "---\n\n# GLUE\n"
    )  # fmt: skip
    return root


@pytest.mark.parametrize("task", ROWS)
def test_local_folder_in_hub_layout_is_read_silently(tmp_path, task, capfd):
    folder = hub_folder(tmp_path / "copy", task)
    data = load_glue(task, tmp_path / "data", hub=str(folder))
    first, *second = (values for name, values in ROWS[task].items() if name != "label")
    assert data.train.texts == [(a.strip(), *(b[i] for b in second or [[None] * 3])) for i, a in enumerate(first)]
    assert data.train.labels == ROWS[task]["label"]
    assert list(data.valid) == list(GLUE[task].valid) and data.classes == GLUE[task].classes
    assert data.source == f"GLUE {task}, from copy by the datasets library"
    assert capfd.readouterr().err == ""


def test_tsv_files_come_first(tmp_path):
    (tmp_path / "glue" / "SST-2").mkdir(parents=True)
    for name in ("train", "dev"):
        (tmp_path / "glue" / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\nfrom a file\t1\n")
    data = load_glue("sst2", tmp_path, hub=str(hub_folder(tmp_path / "copy", "sst2")))
    assert data.train.texts == [("from a file", None)]


def test_error_without_a_network_names_both_options(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    message = refused(load_glue, "sst2", tmp_path, hub="nyu-mll/glue")
    assert "cannot be read from nyu-mll/glue" in message
    assert f"put GLUE's tsv files into {tmp_path / 'glue' / 'SST-2'}" in message
    assert "give this machine access to the hub" in message


@pytest.mark.parametrize(
    ("rows", "classes", "words"),
    [
        ({"text": ["a", "b"], "label": [0, 1]}, None, "sentence"),
        (None, ("positive", "negative"), "its classes are positive, negative, not"),
        ({"sentence": ["fine ", "dull"], "label": [1, -1]}, None, "its example 1 has no label"),
    ],
)
def test_other_columns_classes_and_labels_are_refused(tmp_path, rows, classes, words):
    folder = hub_folder(tmp_path / "copy", "sst2", rows, classes)
    assert words in refused(load_glue, "sst2", tmp_path, hub=str(folder))


def test_labels_without_names_are_refused(tmp_path):
    folder = hub_folder(tmp_path / "copy", "sst2")
    readme = folder / "README.md"
    readme.write_text("---\nconfigs:" + readme.read_text().partition("configs:")[2])
    assert "its classes are without names, not negative, positive" in refused(
        load_glue, "sst2", tmp_path, hub=str(folder)
    )
