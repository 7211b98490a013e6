"""The rows of the table: one for each architecture and mode, and the table as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from groupwise.rows import markdown

EXACT, REFUSED, FALSE_ALARM, WRONG, TRACEBACK = "exact", "refused", "false alarm", "wrong", "traceback"
FAULTS = (FALSE_ALARM, WRONG, TRACEBACK)
MODES = ("flat", "ghost", "per_layer")


@dataclass(frozen=True)
class Row:
    """The result for one architecture in one mode.

    Args:
        family, architecture, mode: what was clipped.
        status: exact, refused, false alarm (`verify` refuses what the engine clips exactly), wrong or traceback.
        error: the largest relative error of clipped sums and norms; None unless exact or wrong.
        dropout: the status of a step with dropout: "taken", one of the words above, or "" if it was not tried.
        note: the message of the refusal, or the exception and its place.
    """

    family: str
    architecture: str
    mode: str
    status: str
    error: float | None = None
    dropout: str = ""
    note: str = ""

    @property
    def faulty(self) -> bool:
        """Whether there is a wrong sum, a false alarm or a traceback, with dropout or without."""
        return self.status in FAULTS or self.dropout in FAULTS

    @property
    def line(self) -> list[str]:
        """The line of the CSV, under `HEAD`."""
        error = "" if self.error is None else f"{self.error:.0e}"
        return list((asdict(self) | {"error": error}).values())


HEAD = tuple(field.name for field in fields(Row))


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """The number of architectures, and of each status in each mode."""
    names = {row["architecture"] for row in rows}
    sentences = []
    for mode in MODES:
        of = [row for row in rows if row["mode"] == mode]
        counts = {status: sum(row["status"] == status for row in of) for status in (EXACT, REFUSED, *FAULTS)}
        sentences.append(f"- `{mode}`: {', '.join(f'{n} {status}' for status, n in counts.items() if n)}.")
    worst = max((float(row["error"]) for row in rows if row["status"] == EXACT), default=0.0)
    first = f"{len(names)} architectures; the largest relative error of an exact one is {worst:.0e}."
    return "\n".join([first, "", *sentences])


def tables(rows: Sequence[Mapping[str, str]]) -> str:
    """A table for each family with a line for each architecture; then the numbered messages of the tables."""
    notes: dict[str, int] = {}
    parts = []
    for family in dict.fromkeys(row["family"] for row in rows):
        lines: dict[str, dict[str, Mapping[str, str]]] = {}
        for row in rows:
            if row["family"] == family:
                lines.setdefault(row["architecture"], {})[row["mode"]] = row
        body = [
            [name, *(_cell(of[mode], notes) if mode in of else "–" for mode in MODES)] for name, of in lines.items()
        ]
        parts.append(f"### {family}\n\n{markdown(['architecture', *(f'`{mode}`' for mode in MODES)], body)}")
    if notes:
        parts.append("### Sentences\n\n" + "\n".join(f"{number}. {note}" for note, number in notes.items()))
    return "\n\n".join(parts)


def _cell(row: Mapping[str, str], notes: dict[str, int]) -> str:
    words = [row["status"]]
    if row["dropout"] and row["dropout"] != "taken":
        words.append(f"dropout {row['dropout']}")
    cell = ", ".join(words)
    if not row["note"]:
        return cell
    note = row["note"].replace("|", "\\|").replace("<", "&lt;")
    return f"{cell} ({notes.setdefault(note, len(notes) + 1)})"
