"""Defines the columns of a result row, and reads and writes tables of rows, `results/measured/<sweep>_<scale>.csv`.

A run's row is its `result.json`: the hash, every key of the configuration, then `git.`, `plan.`, `system.`, `seeds.`,
`data.` and the final metrics. Values that were computed from training examples without noise are named
`nonprivate/...`. A table has `sweep`, `cell`, `seed` and `scale` first, and no `paths.`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.atomic import write_text
from groupwise.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, str]

SCALES = ("paper", "lite", "midi", "mini", "demo", "smoke")
"""The scales, from the paper's size to the smallest."""
KEYS = ("sweep", "cell", "seed", "scale")
"""Columns that identify a row of a table."""
ORIGIN = ("hash", "git.sha", "git.dirty")
"""Columns that say where a row comes from; every row has them."""
FIRST = ("task", "model.name", "model.fresh", "clip.name", "privacy.epsilon", "optim.learning_rate")
"""The settings that come first in a table."""
NONPRIVATE = "nonprivate/"
"""Prefix of values that were computed from the training examples without noise."""
HELD_OUT = ("valid/", "test/")
"""Prefixes of the metrics on held-out examples."""
METRICS = (*HELD_OUT, f"{NONPRIVATE}train_")
"""Prefixes of all metrics of an evaluation."""
PUBLIC_DATA = (
    "train_examples", "valid_examples", "test_examples", "image_size", "max_length", "selected_on", "generated",
    "public_text", "pretrained",
)  # fmt: skip
"""Entries of a data description that are settings, N, or about the held-out sets. `source` is not among them, because
it counts rows of the files, before examples are chosen."""
NOT_IN_TABLES = "paths."


def row_of_data(description: Mapping[str, Any]) -> dict[str, Any]:
    """A task's description of its data, as columns ``data.<key>`` or ``nonprivate/data.<key>`` of a row."""
    return {f"{'' if key in PUBLIC_DATA else NONPRIVATE}data.{key}": value for key, value in description.items()}


def table_path(folder: Path, sweep: str, scale: str, kind: str = "") -> Path:
    """The file of a sweep's rows at a scale, or of their "curves" (evaluations over time) or "texts" (samples)."""
    return folder / f"{sweep}_{scale}{kind and '_'}{kind}.csv"


def read_table(path: Path) -> list[Row]:
    """The rows of a table as text, none if there is no file; raises `UserError` if it cannot be read."""
    if not path.is_file():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a table ({error}): fix or remove it.") from error
    if any(None in row or None in row.values() for row in rows):
        raise UserError(f"{path} is not a table (a line has more or fewer values than columns): fix or remove it.")
    return rows


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = FIRST) -> None:
    """Write a table atomically: `KEYS` first, then `columns`, metrics, and the other columns by name."""
    present = {key for row in rows for key in row}
    first = [key for key in (*KEYS, *columns) if key in present]
    metrics = [key for prefix in METRICS for key in sorted(present) if key.startswith(prefix)]
    columns = [*first, *metrics, *sorted(present - {*first, *metrics})]
    write_text(path, csv_text(columns, ([row.get(key, "") for key in columns] for row in rows)))


def load_runs(folder: str | Path = "results/runs") -> pd.DataFrame:
    """The finished runs in a folder as a data frame, one row each: `folder`, then the keys of its `result.json`.

    Raises `UserError` if there are none.
    """
    import pandas as pd

    runs = sorted(done.parent for done in Path(folder).glob("*/DONE"))
    if not runs:
        raise UserError(f"{folder} has no finished run: give the folder of the runs, such as results/runs.")
    return pd.DataFrame(
        {"folder": str(run), **json.loads((run / "result.json").read_text(encoding="utf-8"))} for run in runs
    )


def csv_text(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV; None is an empty field."""
    # Written with "\r\n" first: before Python 3.13, a field is quoted only for characters of the line end.
    lines: list[str] = []
    file = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n"))
    csv.writer(file).writerows([head, *rows])
    return "".join(lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def between_markers(text: str, name: str, content: str, page: Path) -> str:
    """`text` with the part between `<!-- begin NAME … -->` and `<!-- end NAME -->` replaced by `content`."""
    pattern = re.compile(rf"(<!-- begin {name}\b[^>]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UserError(f"{page} must have one pair of markers <!-- begin {name} --> and <!-- end {name} -->.")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)
