"""Reads four GLUE tasks from the original tsv files, or from the hub if these are missing (appendix A.2)."""

import csv
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        classes: the classes' names, by label.
        spelled: the classes' spelling in the column `label`, by label.
        valid: validation files by name.
        hub_texts: the names of the columns `texts` on the hub; empty if they are the same. The label is "label" there.
        hub_valid: validation splits on the hub, by name.
        dropped: a phrase for rows of the published files without a label, which are dropped and counted. Empty if there
            are none. Other loaders also drop such rows, but not the same number of them.
    """

    folder: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    spelled: tuple[str, ...]
    label: str = "label"
    valid: Mapping[str, str] = field(default_factory=lambda: {"": "dev.tsv"})
    hub_texts: tuple[str, ...] = ()
    hub_valid: Mapping[str, str] = field(default_factory=lambda: {"": "validation"})
    dropped: str = ""


GLUE = {
    "sst2": GlueTask(folder="SST-2", texts=("sentence",), classes=("negative", "positive"), spelled=("0", "1")),
    "qnli": GlueTask(
        folder="QNLI",
        texts=("question", "sentence"),
        classes=("entailment", "not_entailment"),
        spelled=("entailment", "not_entailment"),
    ),
    "qqp": GlueTask(
        folder="QQP",
        texts=("question1", "question2"),
        label="is_duplicate",
        classes=("not_duplicate", "duplicate"),
        spelled=("0", "1"),
        dropped="incomplete rows",
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
        dropped="rows without an agreed label",
    ),
}


def load_glue(name: str, root: Path, *, hub: str, train_file: str | None = None) -> LabelledText:
    """Load sst2, qnli, qqp or mnli.

    If the task's folder (SST-2, QNLI, QQP, MNLI) is in `root`/glue or in `root`, its tsv files are read. All of them
    must exist. Otherwise the data set `hub` is loaded (see `load_from_hub`).

    Args:
        hub: a name on the hub, or a local folder in the hub's layout.
        train_file: a training file in the task's folder, in place of train.tsv.

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
            notes.append(f"; {dropped:,} {task.dropped} of {file} dropped")
    return LabelledText(
        train=parts[0],
        valid=dict(zip(task.valid, parts[1:], strict=True)),
        classes=task.classes,
        source=f"GLUE {task.folder}, tsv files (training: {files[0].name}){''.join(notes)}",
        sha256=sha256_of_files(files, root),
    )


def read_glue_tsv(path: Path, task: GlueTask) -> tuple[Labelled, int]:
    """Read one file of labelled rows: the examples, and how many rows were dropped.

    Columns are found by their names in the header. Quotes are ordinary characters. Blanks around texts are removed.

    Raises:
        UserError: the file or a column is missing, there is no example, or a label is unknown and `task.dropped` is
            empty.
    """
    import pandas as pd

    advice = f"put all files of GLUE's {task.folder} there, or give data.train_file=FILE, another training file of it"
    columns = [*task.texts, task.label]
    text = read_text(path, advice).replace("\r\n", "\n")
    how: Any = {"sep": "\t", "lineterminator": "\n", "quoting": csv.QUOTE_NONE, "dtype": str, "keep_default_na": False}
    try:
        table = pd.read_csv(io.StringIO(text), usecols=columns, skip_blank_lines=False, **how)
    except ValueError as error:
        raise UserError(
            f"{path} is not a tab-separated table with the columns {', '.join(columns)} ({reason(error)}); {advice}."
        ) from error
    words = table[task.label].str.strip()
    known = words.isin(task.spelled)
    if not task.dropped and not known.all():
        line = int(known.argmin())
        raise UserError(
            f"{path}: line {line + 2} has the {task.label} {words[line]!r}, not {' or '.join(task.spelled)}; fix it."
        )
    if not known.any():
        raise UserError(f"{path} has no example; replace the file.")
    sides = [table.loc[known, name].str.strip().tolist() for name in task.texts]
    texts: list[Texts] = list(zip(sides[0], sides[1] if sides[1:] else [None] * len(sides[0]), strict=True))
    return Labelled(texts, [task.spelled.index(word) for word in words[known]]), int((~known).sum())


def load_from_hub(name: str, hub: str, place: Path) -> LabelledText:
    """Load the configuration `name` (sst2, qnli, qqp, mnli) of `hub` with the datasets library and its cache.

    The SHA-256 are those of the examples, not of files.

    Args:
        hub: a name on the hub (nyu-mll/glue), or a folder with a README.md that lists its configurations' files.
        place: the folder where tsv files are missing, for the message.

    Raises:
        UserError: the data set is neither on the hub nor in the cache, or it is not GLUE's.
    """
    import datasets

    task = GLUE[name]
    splits = ["train", *task.hub_valid.values()]
    folder = Path(hub).expanduser()
    title = folder.name if folder.is_dir() else hub
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would fill a log
    try:
        loaded: Any = datasets.load_dataset(str(folder) if folder.is_dir() else hub, name, split=splits)
        parts = [_examples(part, task) for part in loaded]
    except Exception as error:  # pyarrow, httpx, yaml and others may raise through the library
        raise UserError(
            f"GLUE's {name} is not on this machine and cannot be read from {hub} ({reason(error)}); put GLUE's tsv "
            f"files into {place}, or give this machine access to the hub."
        ) from error
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


def _examples(part: Any, task: GlueTask) -> Labelled:
    """The texts and labels of one split. Raises ValueError for classes that are not GLUE's, or a missing label."""
    names = tuple(getattr(part.features["label"], "names", ()))
    if names != task.classes:
        raise ValueError(f"its classes are {', '.join(names) or 'without names'}, not {', '.join(task.classes)}")
    rows = zip(*(part[column] for column in task.hub_texts or task.texts), strict=True)
    texts: list[Texts] = [(first.strip(), second[0].strip() if second else None) for first, *second in rows]
    labels = list(part["label"])
    if -1 in labels:  # the hub's label of an example without one
        raise ValueError(f"its example {labels.index(-1)} has no label")
    return Labelled(texts, labels)
