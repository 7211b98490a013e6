"""GLUE through the datasets library: from the Hugging Face hub, or from a local folder in the hub's layout."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.data.glue import GLUE, GlueTask
from groupwise.data.text_examples import Labelled, LabelledText, Texts, sha256_of_examples
from groupwise.errors import UserError, reason

NETWORK_PATIENCE = 10.0  # seconds without an answer after which the hub is taken to be out of reach


def load_from_hub(name: str, hub: str, place: Path) -> LabelledText:
    """Load the configuration `name` (sst2, qnli, qqp, mnli) of `hub`.

    What is downloaded stays in the datasets library's own cache, and is found there again without a network. Of a
    local folder nothing is cached. The fingerprints are of the examples, not of files.

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
    except Exception as error:  # the library lets through what pyarrow, httpx, yaml and others raise
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
    """Ask the hub once; when it is silent, have the library look into its cache instead of trying again and again.

    Yields why the library is offline; nothing where it is not.
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
