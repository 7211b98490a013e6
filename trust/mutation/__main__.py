"""Tries whether the tests notice mistakes:  python -m trust.mutation privacy   (or clipping)

Makes every small mistake of `trust/mutation/operators.py`, one at a time, in each file of the package, and runs the
tests of the package that reach the changed line until one fails. A mistake that none notices has survived. Those that
change nothing anyone could see are listed with the reason in `trust/mutation/equivalent_mutants.txt`, and counted.
"""

import argparse
import csv
import hashlib
import itertools
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text
from groupwise.rows import csv_text, markdown
from groupwise.training.provenance import git_state
from trust.mutation.operators import Mutant, mutants

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
    lines = []
    for row in rows:
        score, low, high = (f"{100 * float(share):.1f}" for share in row[8:])
        lines.append([*row[1:8], f"{score} %", f"{low} to {high} %"])
    return markdown(HEAD, lines)


def write(file: Path, package: str, rows: Sequence[tuple[str, ...]], commit: str) -> None:
    """Replace one package's rows in a CSV by these, tried at a commit (its short hash, or empty)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: list[tuple[str, ...]] = []
    if file.exists():
        with file.open(newline="") as stream:
            kept = [tuple(row) for row in list(csv.reader(stream))[1:] if row[0] != package]
    write_text(file, csv_text((*COLUMNS, "commit"), sorted([*kept, *((*row, commit) for row in rows)])))


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "trust"
NOT_HERE: dict[str, tuple[str, ...]] = {"privacy": ("privacy/audit/",), "clipping": ()}
PATIENCE = 10.0
"""Seconds of processor time beyond four times what the tests take, until a mutant counts as one that never ends."""
NO_TESTS: dict[str, tuple[str, ...]] = {"privacy": ("test_audit",), "clipping": ()}


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write `results/trust/mutation.csv`."""
    parser = argparse.ArgumentParser(prog="python -m trust.mutation", description=__doc__.split("\n\n")[0])
    parser.add_argument("package", choices=sorted(NOT_HERE))
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn at random; 0: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--file", default="", help="only files whose name contains this (writes no results)")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was found; a new call goes on from it")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after so long; 0: print what --work holds"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        return _run(options, options.work or Path(scratch))


def _run(options: argparse.Namespace, work: Path) -> int:
    work.mkdir(parents=True, exist_ok=True)

    everything = [
        m for file in _files(options.package) for m in mutants((ROOT / "src/groupwise" / file).read_text(), file)
    ]
    chosen = [m for m in everything if options.file in m.file]
    # In the order of a hash: a run that is cut short is a random sample too, and one file's edit leaves the others' be.
    chosen.sort(key=lambda m: hashlib.sha256(f"{options.seed} {m.name}".encode()).digest())
    chosen = chosen[: options.sample or None]
    book = Book(work / f"{options.package}.jsonl", options.package)
    if options.minutes:
        measure(options.package, chosen, book, work / options.package, time.monotonic() + 60 * options.minutes)
    equivalent = Equivalent()
    tried = itertools.takewhile(lambda mutant: mutant.name in book.known, chosen)  # without gaps, so a random sample
    verdicts = [(mutant, book.known[mutant.name][0]) for mutant in tried]
    rows = records(options.package, everything, verdicts, equivalent)
    print(table(rows))
    if not options.file:
        write(RESULTS / "mutation.csv", options.package, rows, (git_state(ROOT)["sha"] or "")[:7])
    for mutant, verdict in verdicts:
        if verdict == "survived" and mutant.name not in equivalent:
            print(f"survived: {mutant.name}  (line {mutant.first})", file=sys.stderr)
    return 0


def measure(package: str, chosen: list[Mutant], book: "Book", folder: Path, until: float) -> None:
    """Run the tests of every mutant in ``chosen`` that the book does not know yet, ``until`` that time is past."""
    from trust.mutation.pytest_plugin import Chosen, Coverage
    from trust.mutation.sandbox import Sandbox, warm_up

    todo = [mutant for mutant in chosen if mutant.name not in book.known]
    if not todo:
        return
    print(f"{len(chosen)} mutants, {len(todo)} to try", file=sys.stderr)
    box = Sandbox(ROOT, folder)
    cache, log, killer = folder / "cache", folder / "log", folder / "killer"
    ready = folder.with_name(f"{package}-{_hash(*_tree(box.folder, package))}")  # every line's tests, while files stay
    if not ready.exists():
        print("first all tests, twice", file=sys.stderr)
        tests = [f"tests/{package}", "--hypothesis-seed=0", *(f"--ignore-glob=*/{name}*" for name in NO_TESTS[package])]
        cache.mkdir()
        box.run(tests, lambda: Coverage(box.source, folder / ".coverage"), log, 3000, cache, True)
        found = json.loads((folder / "coverage.json").read_text())
        warm_up((folder / "modules.txt").read_text().split())
        shutil.copytree(cache, folder / "clean")
        everyone = sorted(found["seconds"], key=found["seconds"].__getitem__)
        control = box.run(tests, lambda: Chosen(everyone, killer), log, 3000, cache, False)
        if control != "passed":
            raise SystemExit(f"error: without any mutant, in this order, the tests are {control}; see {log}.")
        ready.mkdir()
        for name in ("coverage.json", "modules.txt", "clean"):
            (folder / name).rename(ready / name)
    found = json.loads((ready / "coverage.json").read_text())
    warm_up((ready / "modules.txt").read_text().split())
    for test in found["failed"]:
        print(f"fails or is skipped without any mutant, and so is left out: {test}", file=sys.stderr)

    killers: dict[str, Counter[str]] = defaultdict(Counter)
    for number, mutant in enumerate(todo, 1):
        if time.monotonic() > until:
            return
        order = _order(mutant, found, killers)
        verdict, by = ("survived", "no test reaches it")
        if order:
            file = box.source / mutant.file
            original = file.read_text()
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(ready / "clean", cache)
            killer.unlink(missing_ok=True)
            changed = mutant.apply(original)
            compile(changed, str(file), "exec")  # a mutant that is no Python would count as killed
            box.write(file, changed)
            arguments = [*sorted({test.split("::")[0] for test in order}), "-x", "--tb=no", "--hypothesis-seed=0"]
            cpu = PATIENCE + 4 * sum(found["seconds"][test] for test in order)
            outcome = box.run(arguments, lambda order=order: Chosen(order, killer), log, cpu, cache, False)  # type: ignore[misc]
            box.write(file, original)
            verdict = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
            by = killer.read_text() if killer.exists() else "import" if verdict == "killed" else ""
            if verdict == "killed":
                killers[mutant.file][by] += 1
                killers[mutant.file + mutant.place][by] += 1
        book.add(mutant, verdict, by, box.folder)
        print(f"{number}/{len(todo)} {verdict}: {mutant.name}", file=sys.stderr, flush=True)


def _order(mutant: Mutant, found: dict[str, Any], killers: dict[str, Counter[str]]) -> list[str]:
    """The tests that may notice, likeliest first: who noticed its neighbours, who reaches its file, the quick.

    What runs as a file is imported (a constant, a decorator) is read by code elsewhere too: all tests may notice.
    """
    lines: dict[str, list[str]] = found["lines"].get(f"groupwise/{mutant.file}", {})
    who = {test for line in range(mutant.first, mutant.last + 1) for test in lines.get(str(line), [])}
    here = {test for tests in lines.values() for test in tests}
    if "import" in who:
        who = set(found["seconds"])
    near, far = killers[mutant.file + mutant.place], killers[mutant.file]
    return sorted(who, key=lambda test: (-near[test], test not in here, -far[test], found["seconds"][test]))


class Book:
    """What was found so far: a line of JSON for each mutant. It holds while the file and the killing test stay."""

    def __init__(self, file: Path, package: str) -> None:
        self.file, self.package = file, package
        self.known: dict[str, tuple[str, str]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            entry = json.loads(line)
            if entry["source"] == _hash(ROOT / "src/groupwise" / entry["file"]) and entry["test"] == self._test(
                entry, ROOT
            ):
                self.known[entry["name"]] = (entry["verdict"], entry["by"])

    def add(self, mutant: Mutant, verdict: str, by: str, tried: Path) -> None:
        """Write one down; ``tried`` is the folder whose sources and tests it was tried on."""
        self.known[mutant.name] = (verdict, by)
        entry = {"name": mutant.name, "file": mutant.file, "verdict": verdict, "by": by}
        entry |= {"source": _hash(tried / "src/groupwise" / mutant.file), "test": self._test(entry, tried)}
        with self.file.open("a") as out:
            out.write(json.dumps(entry) + "\n")

    def _test(self, entry: dict[str, str], base: Path) -> str:
        """The hash of the test file that killed, or of all tests where none did."""
        if entry["verdict"] == "killed" and "::" in entry["by"]:
            return _hash(base / entry["by"].split("::")[0])
        return _hash(*_tree(base, self.package))


def _tree(base: Path, package: str) -> list[Path]:
    """What decides which tests reach which lines: the files under test and the tests that are run."""
    tests = (file for file in (base / "tests" / package).glob("*.py") if not file.name.startswith(NO_TESTS[package]))
    return sorted([*tests, *(base / "src/groupwise" / file for file in _files(package))])


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:16]


def _files(package: str) -> Iterable[str]:
    base = ROOT / "src" / "groupwise"
    names = (str(path.relative_to(base)) for path in sorted((base / package).rglob("*.py")))
    return [name for name in names if not name.startswith(NOT_HERE[package])]


if __name__ == "__main__":
    sys.exit(main())
