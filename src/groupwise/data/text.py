"""Loads the texts of a language task by the task's name, and chooses among them: a held-out share, a smaller set."""

import random
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from groupwise.data.glue import GLUE, load_glue
from groupwise.data.samsum import load_samsum
from groupwise.data.synthetic_text import synthetic_labelled, synthetic_paired
from groupwise.data.table_to_text import load_dart, load_e2e
from groupwise.data.text_examples import Labelled, LabelledText, PairedText, Request, Texts, by_source, keyed_fraction
from groupwise.errors import UserError

__all__ = [
    "Labelled",
    "LabelledText",
    "PairedText",
    "Request",
    "Texts",
    "hold_out",
    "keep",
    "load_labelled",
    "load_paired",
    "synthetic_labelled",
    "synthetic_paired",
]

PAIRED = {"e2e": load_e2e, "dart": load_dart, "samsum": load_samsum}

Data = TypeVar("Data", LabelledText, PairedText)


def load_labelled(task: str, root: Path, *, hub: str, train_file: str | None = None) -> LabelledText:
    """Load sst2, qnli, qqp or mnli from files under `root`, else from `hub`; see `glue.load_glue`.

    Raises:
        UserError: an unknown task; missing or broken data.
    """
    if task not in GLUE:
        raise UserError(f"task={task} has no labelled texts; choose one of {', '.join(GLUE)}.")
    return load_glue(task, Path(root), hub=hub, train_file=train_file)


def load_paired(task: str, root: Path, *, train_file: str | None = None) -> PairedText:
    """Load e2e, dart or samsum from files under `root`; see `table_to_text` and `samsum`.

    Raises:
        UserError: an unknown task; missing or broken data.
    """
    if task not in PAIRED:
        raise UserError(f"task={task} has no pairs of texts; choose one of {', '.join(PAIRED)}.")
    return PAIRED[task](Path(root), train_file)


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
