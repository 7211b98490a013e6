"""Writes results/trust/*.md, and their summaries in docs/trust.md and docs/models.md:  python -m trust.page

Each CSV in results/trust becomes a page of tables beside it; the documents hold a summary of each.
"""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from groupwise.atomic import write_text
from groupwise.errors import command
from groupwise.rows import between_markers, markdown
from trust.bad_input.attempt import DEFECTS
from trust.models.rows import summary, tables

PAGE, MODELS = Path("docs/trust.md"), Path("docs/models.md")
RESULTS = Path("results/trust")
NOTHING = "Not measured yet."
Rows = list[dict[str, str]]
DESIGNS = {
    "full": "one release of the whole data",
    "poisson": "four releases of Poisson samples, each a quarter of the data",
    "counts": "the released counts alone",
    "worlds": "a real task's model, data, loss and dropout, in one release played 300 times with one example and 300 "
    "times without, along that example's mean gradient; it does not add all that an example may, and 300 plays prove "
    "no ε above 3.7",
}
"""Design of an audit -> the release that it attacks."""


def audits(rows: Rows) -> str:
    """A table for each design; a line for each mode, model, allocation and share of the counts; a column for each ε."""
    budgets = sorted({row["epsilon_claimed"] for row in rows}, key=float)
    head = ["clip", "model", "noise", "r", *(f"ε = {budget}" for budget in budgets)]
    tables = []
    for design in sorted({row["design"] for row in rows}):
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            if row["design"] == design:
                dropout = "" if row["dropout"] == "0" else f", dropout {row['dropout']}"
                of = (f"`{row['mode']}`", row["model"] + dropout, row["noise"], row["quantile_budget"])
                lines.setdefault(of, {})[row["epsilon_claimed"]] = row["epsilon_lower"]
        table = markdown(head, [[*of, *(found.get(budget, "–") for budget in budgets)] for of, found in lines.items()])
        tables.append(f"Design `{design}`: {DESIGNS[design]}.\n\n{table}")
    return "\n\n".join(tables)


def audit_summary(rows: Rows) -> str:
    """The number of audits, how many exceed their claim, and the largest bound as a share of each claim."""
    parts = []
    for budget in sorted({row["epsilon_claimed"] for row in rows}, key=float):
        of = [row for row in rows if row["epsilon_claimed"] == budget]
        best = max(float(row["epsilon_lower"]) for row in of)
        parts.append(f"ε = {budget}: {best / float(budget):.0%}")
    above = sum(float(row["epsilon_lower"]) > float(row["epsilon_claimed"]) for row in rows)
    bounds = "; ".join(parts)
    return f"{len(rows)} audits, {above} above their claim. The largest bound in percent of its claim: {bounds}."


def planted_summary(rows: Rows) -> str:
    """The number of bugs, how many were caught, the weakest bound with a bug, and the largest without."""
    least = min(rows, key=lambda row: float(row["bug_epsilon"]) / float(row["claimed_epsilon"]))
    most = max(float(row["correct_epsilon"]) / float(row["claimed_epsilon"]) for row in rows)
    return (
        f"{len(rows)} bugs, {sum(row['caught'] == 'yes' for row in rows)} caught. The weakest bound with a bug is ε ≥ "
        f"{least['bug_epsilon']} where {least['claimed_epsilon']} is claimed ({least['bug']}); without bugs no "
        f"bound exceeds {most:.1%} of its claim."
    )


def planted(rows: Rows) -> str:
    """A line for each bug."""
    head = ["bug", "claimed ε", "at least, with the bug", "at least, without", "caught", "how"]
    names = ("bug", "claimed_epsilon", "bug_epsilon", "correct_epsilon", "caught", "how")
    return markdown(head, [[row[name] or "–" for name in names] for row in rows])


def faults_summary(rows: Rows) -> str:
    """The number of kinds that were tried, of trials, and of lost ones."""
    tried, lost = (sum(int(row[name]) for row in rows) for name in ("tried", "lost"))
    return f"{sum(row['tried'] != '0' for row in rows)} kinds of fault, tried {tried} times: {lost} lost."


def bad_input_summary(rows: Rows) -> str:
    """The numbers of attempts, of each outcome, and of defects."""
    totals = {name: sum(int(row[name]) for row in rows) for name in rows[0] if name != "kind"}
    defects = {name: totals.get(name, 0) for name in DEFECTS}
    sound = ", ".join(f"{totals[name]:,} {name}" for name in ("ran", "accepted", "refused", "stopped"))
    found = ", ".join(f"{count} {name}" for name, count in defects.items() if count)
    return f"{totals['tried']:,} attempts of {len(rows)} kinds: {sound}; {sum(defects.values())} defects" + (
        f" ({found})." if found else "."
    )


def plain(rows: Rows) -> str:
    """A table of all rows and columns."""
    return markdown([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def norms_summary(rows: Rows) -> str:
    """The largest errors over all layers, sizes and laws."""
    under, over = (max(rows, key=lambda row: float(row[name])) for name in ("understated", "over_threshold"))
    return (
        f"{len(rows)} cases. A norm is under-stated by at most {under['understated']} ({under['formula']}), "
        f"a threshold exceeded by at most {over['over_threshold']} ({over['formula']}); 1e-6 is allowed."
    )


def norms(rows: Rows) -> str:
    """A line for each formula and size: the largest errors over all laws, and the law with the largest norm error."""
    by_layer: dict[tuple[str, str], Rows] = {}
    for row in rows:
        by_layer.setdefault((row["formula"], row["entries"]), []).append(row)
    lines = []
    for (formula, entries), of in by_layer.items():
        worst = max(of, key=lambda row: float(row["understated"]))
        over = max((row["over_threshold"] for row in of), key=float)
        lines.append([formula, f"{int(entries):,}", worst["law"], worst["understated"], over])
    head = ["formula", "entries", "law", "most that a norm is under-stated", "most that a threshold is exceeded"]
    return markdown(head, lines)


@dataclass(frozen=True)
class Evidence:
    """How `results/trust/<name>.csv` is shown: the document with its summary, its title, its summary and its tables."""

    name: str
    page: Path
    title: str
    summary: Callable[[Rows], str]
    tables: Callable[[Rows], str]


EVIDENCE = (
    Evidence("audit", PAGE, "Audits", audit_summary, audits),
    Evidence("planted", PAGE, "Planted bugs", planted_summary, planted),
    Evidence("faults", PAGE, "Faults", faults_summary, plain),
    Evidence("bad_input", PAGE, "Bad input", bad_input_summary, plain),
    Evidence("norms", PAGE, "Norms", norms_summary, norms),
    Evidence("models", MODELS, "Models", summary, tables),
)


def rows_of(name: str, results: Path) -> Rows:
    """The rows of `<results>/<name>.csv`; none if there is no such file."""
    path = results / f"{name}.csv"
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def fill(text: str, results: Path = RESULTS, page: Path = PAGE) -> str:
    """The text of a page with the summary of each of its files in `results` between its markers.

    Raises:
        UserError: a pair of markers is missing.
    """
    for evidence in EVIDENCE:
        if evidence.page == page:
            rows = rows_of(evidence.name, results)
            text = between_markers(text, evidence.name, evidence.summary(rows) if rows else NOTHING, page)
    return text


def full(evidence: Evidence, results: Path = RESULTS) -> str:
    """The page of tables for the CSV."""
    rows = rows_of(evidence.name, results)
    origin, page = f"Made by `python -m trust.page` from `{evidence.name}.csv`", evidence.page.as_posix()
    shown = evidence.tables(rows) if rows else NOTHING
    return f"# {evidence.title}\n\n{origin}; what it means is in `{page}`.\n\n{shown}\n"


@command
def main() -> int:
    """The command line; returns the exit code."""
    for page in dict.fromkeys(evidence.page for evidence in EVIDENCE):
        write_text(page, fill(page.read_text(encoding="utf-8"), page=page))
    for evidence in EVIDENCE:
        write_text(RESULTS / f"{evidence.name}.md", full(evidence))
    print(f"{PAGE}, {MODELS} and {RESULTS}/*.md show what {RESULTS}/*.csv hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
