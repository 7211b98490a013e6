"""The mutation score as a table and as `results/trust/mutation.csv`."""

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from pathlib import Path

from trust.mutation.operators import Mutant

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
COLUMNS = ("package", "file", "mutants", "tried", "killed", "timeout", "survived", "equivalent", "score", "low", "high")
"""Of a row; the CSV adds the commit, whose names of files they are."""
HEAD = ("file", "mutants", "tried", "killed", "timeout", "survived", "equivalent", "score", "95 % interval")


class Equivalent:
    """Which mutants no test can notice: in the file a line `= reason`, then names, in which … stands for any text."""

    def __init__(self, text: str | None = None) -> None:
        text = text if text is not None else EQUIVALENT.read_text() if EQUIVALENT.exists() else ""
        names = [line.strip() for line in text.splitlines() if line.strip() and line[0] not in "#="]
        self._names = re.compile("|".join(".*".join(map(re.escape, name.split("…"))) for name in names) or "(?!)")

    def __contains__(self, name: object) -> bool:
        """Whether the mutant of this name is listed."""
        return self._names.fullmatch(str(name)) is not None


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    if not tries:
        return 0.0, 1.0
    z, share = 1.959964, hits / tries
    middle = (share + z * z / (2 * tries)) / (1 + z * z / tries)
    half = z / (1 + z * z / tries) * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return middle - half, middle + half


def records(
    package: str, made: Sequence[Mutant], verdicts: Sequence[tuple[Mutant, str]], equivalent: Container[str]
) -> list[tuple[str, ...]]:
    """Return a row of `COLUMNS` for each file and one for "all"; the interval is a point where all were tried."""
    totals: Counter[str] = Counter()
    for mutant in made:
        totals.update((mutant.file, "all"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, verdict in verdicts:
        kind = "equivalent" if verdict == "survived" and mutant.name in equivalent else verdict
        for name in (mutant.file, "all"):
            counts[name][kind] += 1
    rows = []
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count, tried = counts[name], counts[name].total()
        hits, of = count["killed"] + count["timeout"], tried - count["equivalent"]
        score = hits / of if of else 1.0
        low, high = (score, score) if tried == totals[name] else wilson(hits, of)
        kinds = (str(count[kind]) for kind in ("killed", "timeout", "survived", "equivalent"))
        shares = (f"{share:.4f}" for share in (score, low, high))
        rows.append((package, name, str(totals[name]), str(tried), *kinds, *shares))
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    for row in rows:
        score, low, high = (f"{100 * float(share):.1f}" for share in row[8:])
        lines.append(f"| {' | '.join(row[1:8])} | {score} % | {low} to {high} % |")
    return "\n".join(lines)


def write(file: Path, package: str, rows: Sequence[tuple[str, ...]], commit: str) -> None:
    """Replace one package's rows in a CSV by these, tried at a commit (its short hash, or empty)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: list[tuple[str, ...]] = []
    if file.exists():
        with file.open(newline="") as stream:
            kept = [tuple(row) for row in list(csv.reader(stream))[1:] if row[0] != package]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow((*COLUMNS, "commit"))
        writer.writerows(sorted([*kept, *((*row, commit) for row in rows)]))
