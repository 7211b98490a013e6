"""Writes the tables of docs/trust.md and docs/models.md from results/trust/*.csv:  python -m trust.page"""

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from groupwise.analysis.benchmark_tables import between_markers, markdown
from groupwise.atomic import write_text
from groupwise.errors import UserError
from trust.models.rows import summary, tables

PAGE, MODELS = Path("docs/trust.md"), Path("docs/models.md")
RESULTS = Path("results/trust")
Rows = list[dict[str, str]]


def audits(rows: Rows) -> str:
    """A table a design: one line a mode, model, allocation and share of the counts, one column a budget."""
    budgets = sorted({row["epsilon_claimed"] for row in rows}, key=float)
    head = ["clip", "model", "noise", "r", *(f"ε = {budget}" for budget in budgets)]
    tables = []
    for design in sorted({row["design"] for row in rows}):
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            if row["design"] == design:
                dropout = "" if row["dropout"] == "0" else f", dropout {row['dropout']}"
                of = (f"`{row['mode']}`", row["model"] + dropout, row["noise"], row["quantile_budget"])
                gaussian = row["epsilon_lower_gaussian"] and f" ({row['epsilon_lower_gaussian']})"
                lines.setdefault(of, {})[row["epsilon_claimed"]] = row["epsilon_lower"] + gaussian
        table = markdown(head, [[*of, *(found.get(budget, "–") for budget in budgets)] for of, found in lines.items()])
        tables.append(f"Design `{design}`:\n\n{table}")
    return "\n\n".join(tables)


def audit_summary(rows: Rows) -> str:
    """How many audits, how many broke their claim, and the largest share of each claim that was proven."""
    parts = []
    for budget in sorted({row["epsilon_claimed"] for row in rows}, key=float):
        of = [row for row in rows if row["epsilon_claimed"] == budget]
        best = max(float(row["epsilon_lower"]) for row in of)
        gaussian = max(float(row["epsilon_lower_gaussian"] or 0) for row in of)
        parts.append(f"ε = {budget}: {best / float(budget):.0%} ({gaussian / float(budget):.0%})")
    above = sum(
        max(float(row["epsilon_lower"]), float(row["epsilon_lower_gaussian"] or 0)) > float(row["epsilon_claimed"])
        for row in rows
    )
    return f"{len(rows)} audits, {above} above their claim. The most that one proves of its claim: {'; '.join(parts)}."


def planted(rows: Rows) -> str:
    """One line a bug."""
    head = ["bug", "claimed ε", "at least, with the bug", "at least, without", "caught", "how"]
    names = ("bug", "claimed_epsilon", "bug_epsilon", "correct_epsilon", "caught", "how")
    return markdown(head, [[row[name] or "–" for name in names] for row in rows])


def plain(rows: Rows) -> str:
    """The file as it is."""
    return markdown([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def norms(rows: Rows) -> str:
    """One line a formula and size: the worst of all laws in each column, and the law that is worst for the norm."""
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


def mutants(rows: Rows) -> str:
    """The packages first, then their files."""
    return plain(sorted(rows, key=lambda row: (row["file"] != "all", row["package"], row["file"])))


Tables = tuple[tuple[str, str, Callable[[Rows], str]], ...]
"""Names of markers, files of rows, and what makes the one of the other."""
TABLES: Tables = (
    ("summary", "audit", audit_summary),
    ("audit", "audit", audits),
    ("planted", "planted", planted),
    ("faults", "faults", plain),
    ("bad_input", "bad_input", plain),
    ("norms", "norms", norms),
    ("mutation", "mutation", mutants),
)
PAGES: dict[Path, Tables] = {PAGE: TABLES, MODELS: (("summary", "models", summary), ("models", "models", tables))}


def fill(text: str, results: Path = RESULTS, page: Path = PAGE) -> str:
    """The text of a page with each table as the file of its name in `results` has it.

    Raises:
        UserError: a pair of markers is missing.
    """
    for name, source, make in PAGES[page]:
        path = results / f"{source}.csv"
        content = "Not measured yet."
        if path.is_file():
            with open(path, encoding="utf-8", newline="") as file:
                content = make(list(csv.DictReader(file)))
        text = between_markers(text, name, content, page)
    return text


def main(arguments: Iterable[str] = ()) -> int:
    """The command line; returns the exit code."""
    if list(arguments):
        print(
            "error: python -m trust.page takes no options: it writes docs/trust.md and docs/models.md.", file=sys.stderr
        )
        return 2
    try:
        for page in PAGES:
            write_text(page, fill(page.read_text(encoding="utf-8"), page=page))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{PAGE} and {MODELS} show what {RESULTS} holds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
