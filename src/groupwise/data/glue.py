"""Reads four tasks of GLUE, from the benchmark's own tsv files, or from the hub where there are none (appendix A.2)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.data.text_examples import Labelled, LabelledText, Texts, read_text, sha256_of_examples, sha256_of_files
from groupwise.errors import UserError, reason


@dataclass(frozen=True)
class GlueTask:
    """The layout of a task's files; labels are numbered as on the hub.

    Attributes:
        folder: name of its folder.
        texts: columns of the sentence or the pair.
        label: column of the label.
        classes: the classes' names, by label.
        spelled: the classes' spelling in the label column, by label.
        valid: validation files by name.
        hub_texts: `texts` on the hub, where the label's column is "label".
        hub_valid: validation splits on the hub, by name.
        unlabelled: the entry of the label column where annotators did not agree; such rows are dropped and counted.
        broken_rows: the published training file has rows with too few columns, which are dropped and counted. Other
            loaders drop them too, but do not agree on their number.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    spelled: tuple[str, ...]
    valid: dict[str, str]
    hub_texts: tuple[str, ...]
    hub_valid: dict[str, str]
    unlabelled: str | None = None
    broken_rows: bool = False


GLUE = {
    "sst2": GlueTask(
        folder="SST-2",
        texts=("sentence",),
        label="label",
        classes=("negative", "positive"),
        spelled=("0", "1"),
        valid={"": "dev.tsv"},
        hub_texts=("sentence",),
        hub_valid={"": "validation"},
    ),
    "qnli": GlueTask(
        folder="QNLI",
        texts=("question", "sentence"),
        label="label",
        classes=("entailment", "not_entailment"),
        spelled=("entailment", "not_entailment"),
        valid={"": "dev.tsv"},
        hub_texts=("question", "sentence"),
        hub_valid={"": "validation"},
    ),
    "qqp": GlueTask(
        folder="QQP",
        texts=("question1", "question2"),
        label="is_duplicate",
        classes=("not_duplicate", "duplicate"),
        spelled=("0", "1"),
        valid={"": "dev.tsv"},
        hub_texts=("question1", "question2"),
        hub_valid={"": "validation"},
        broken_rows=True,
    ),
    "mnli": GlueTask(
        folder="MNLI",
        texts=("sentence1", "sentence2"),
        label="gold_label",
        classes=("entailment", "neutral", "contradiction"),
        spelled=("entailment", "neutral", "contradiction"),
        valid={"": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
        hub_texts=("premise", "hypothesis"),
        hub_valid={"": "validation_matched", "mismatched": "validation_mismatched"},
        unlabelled="-",
    ),
}


def load_glue(name: str, root: Path, *, hub: str, train_file: str | None = None) -> LabelledText:
    """Load sst2, qnli, qqp or mnli.

    Where the task's folder (SST-2, QNLI, QQP, MNLI) is in `root`/glue or in `root`, its tsv files are read, and must
    all be there. Else the data set `hub` is loaded by the datasets library (see `glue_hub`).

    Args:
        name: a key of `GLUE`.
        root: folder of the data.
        hub: a name on the hub, or a local folder in the hub's layout.
        train_file: a training file in the task's folder, instead of train.tsv.

    Raises:
        UserError: a missing file or column, a broken row, an unknown label; or the hub cannot be reached.
    """
    task = GLUE[name]
    folder = next((path for path in (root / "glue" / task.folder, root / task.folder) if path.is_dir()), None)
    if folder is None:
        place = root / "glue" / task.folder
        if train_file is not None:
            raise UserError(f"data.train_file={train_file} was given, but its folder {place} is missing; create it.")
        return load_from_hub(name, hub, place)
    parts, notes, files = [], [], []
    for file in (train_file or "train.tsv", *task.valid.values()):
        part, dropped = read_glue_tsv(folder / file, task)
        parts.append(part)
        files.append(folder / file)
        if dropped:
            what = "incomplete rows" if task.broken_rows else "rows without an agreed label"
            notes.append(f"; {dropped:,} {what} of {file} dropped")
    return LabelledText(
        train=parts[0],
        valid=dict(zip(task.valid, parts[1:], strict=True)),
        classes=task.classes,
        source=f"GLUE {task.folder}, tsv files (training: {files[0].name}){''.join(notes)}",
        sha256=sha256_of_files(files, root),
    )


def read_glue_tsv(path: Path, task: GlueTask) -> tuple[Labelled, int]:
    """Read one file of labelled rows: the examples, and how many rows were dropped.

    Columns are found by the header's names. Quotes mean nothing in these files. Blanks around a text are stripped.

    Raises:
        UserError: the file or a column is missing, a row is incomplete, or a label is unknown.
    """
    advice = f"put GLUE's {task.folder} there whole, or name another training file of that folder by data.train_file"
    lines = read_text(path, advice).replace("\r\n", "\n").rstrip("\n").split("\n")
    header = lines[0].split("\t")
    missing = [name for name in (*task.texts, task.label) if name not in header]
    if missing:
        raise UserError(
            f"{path}: line 1 has no column {missing[0]}; expected "
            f"{', '.join((*task.texts, task.label))}, separated by tabs, so replace the file."
        )
    first, second = header.index(task.texts[0]), header.index(task.texts[-1])
    label_at, width = header.index(task.label), len(header)
    numbers = {word: label for label, word in enumerate(task.spelled)}
    texts: list[Texts] = []
    labels: list[int] = []
    dropped = 0
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        if len(cells) < width:
            if task.broken_rows:
                dropped += 1
                continue
            raise UserError(
                f"{path}: line {number} has {len(cells)} columns, but the header has {width}; fix or remove the line."
            )
        word = cells[label_at].strip()
        if word not in numbers:
            if word == task.unlabelled:
                dropped += 1
                continue
            raise UserError(
                f"{path}: line {number} has the {task.label} {word!r}, but {task.folder} knows "
                f"{', '.join(task.spelled)}; fix or remove the line."
            )
        texts.append((cells[first].strip(), None if first == second else cells[second].strip()))
        labels.append(numbers[word])
    if not texts:
        raise UserError(f"{path} holds no example; at least one is needed, so replace the file.")
    return Labelled(texts, labels), dropped


NETWORK_PATIENCE = 10.0  # seconds without an answer after which the hub counts as unreachable


def load_from_hub(name: str, hub: str, place: Path) -> LabelledText:
    """Load the configuration `name` (sst2, qnli, qqp, mnli) of `hub`.

    Downloads stay in the datasets library's own cache and are found there without a network. A local folder is not
    cached. The fingerprints are of the examples, not of files.

    Args:
        name: a key of `GLUE`.
        hub: a name on the hub (nyu-mll/glue), or a folder with a README.md that lists its configurations' files.
        place: the folder in which tsv files were looked for, for the message.

    Raises:
        UserError: the hub does not answer and the cache does not have it, or the data set is not GLUE's.
    """
    task = GLUE[name]
    splits = ["train", *task.hub_valid.values()]
    loaded = _load(hub, name, splits, f"put GLUE's tsv files into {place}")
    parts = [_examples(part, task, f"{hub} ({name}, {split})") for split, part in zip(splits, loaded, strict=True)]
    title = Path(hub).name if Path(hub).expanduser().is_dir() else hub
    return LabelledText(
        train=parts[0],
        valid=dict(zip(task.hub_valid, parts[1:], strict=True)),
        classes=task.classes,
        source=f"GLUE {name}, from {title} by the datasets library",
        sha256={
            f"{title}/{name}/{split}": sha256_of_examples([part.texts, part.labels])
            for split, part in zip(splits, parts, strict=True)
        },
    )


def _load(hub: str, name: str, splits: list[str], way_out: str) -> list[Any]:
    """The splits as data sets of the library, in order."""
    import datasets

    folder, why = Path(hub).expanduser(), ""
    try:
        with _quiet():
            if folder.is_dir():
                with tempfile.TemporaryDirectory(prefix="groupwise-") as scratch:
                    loaded = datasets.load_dataset(str(folder), name, split=splits, cache_dir=scratch)
                    return [_in_memory(part) for part in loaded]
            with _offline_unless_the_hub_answers() as why:
                return [_in_memory(part) for part in datasets.load_dataset(hub, name, split=splits)]
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            f"GLUE's {name} is not on this machine, and {hub} on the Hugging Face hub cannot be reached "
            f"({why or reason(error)}); {way_out}, or give this machine access to the hub."
        ) from error
    except Exception as error:  # the library passes on exceptions of pyarrow, httpx, yaml and others
        raise UserError(f"GLUE's {name} cannot be read from {hub} ({reason(error)}); {way_out}.") from error


def _in_memory(part: Any) -> dict[str, Any]:
    return {"columns": part.to_dict(), "label": part.features.get("label")}


def _examples(part: dict[str, Any], task: GlueTask, title: str) -> Labelled:
    """Check columns, class names and labels."""
    columns = part["columns"]
    for column in (*task.hub_texts, "label"):
        if column not in columns:
            raise UserError(f"{title} has no column {column}; expected {', '.join(task.hub_texts)} and label.")
    names = tuple(getattr(part["label"], "names", None) or task.classes)
    if names != task.classes:
        raise UserError(
            f"{title} has the classes {', '.join(names)}, but GLUE's are {', '.join(task.classes)}, in that order."
        )
    texts: list[Texts] = []
    for cells in zip(*(columns[column] for column in task.hub_texts), strict=True):
        if not all(isinstance(cell, str) for cell in cells):
            raise UserError(f"{title}: row {len(texts)} has no text; every row needs {' and '.join(task.hub_texts)}.")
        texts.append((cells[0].strip(), cells[1].strip() if len(cells) > 1 else None))
    for row, label in enumerate(columns["label"]):
        if not isinstance(label, int) or not 0 <= label < len(task.classes):
            raise UserError(f"{title}: row {row} has the label {label}, but labels are 0 to {len(task.classes) - 1}.")
    if not texts:
        raise UserError(f"{title} holds no example; at least one is needed.")
    return Labelled(texts, columns["label"])


@contextmanager
def _offline_unless_the_hub_answers() -> Iterator[str]:
    """Ask the hub once; if it does not answer, have the library use its cache in place of retrying.

    Yields the reason why the library is offline; empty if it is online.
    """
    from datasets import config
    from huggingface_hub.utils import get_session

    before = config.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" if before else ""
    if not before:
        try:
            get_session().head(config.HF_ENDPOINT, timeout=NETWORK_PATIENCE)
        except Exception as error:  # httpx or requests, as the library's version has it
            why = reason(error)
            config.HF_HUB_OFFLINE = True
    try:
        yield why
    finally:
        config.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of the library."""
    import datasets

    shown = datasets.utils.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
