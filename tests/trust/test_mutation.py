"""The mutation tester: its mutants are what they say, and it tells what a test notices from what none does."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from trust.mutation.__main__ import EQUIVALENT, NOT_HERE, Equivalent, _files, records, wilson
from trust.mutation.operators import mutants

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
LIMIT = 3  # never mutated: comments


def clamp(x: float, most: float = 2.0, *, strict=False) -> float:
    """Text."""
    if x < 0 or not strict:
        raise ValueError("negative" + "!")
    with guard():
        total = -x * most
    total += 1
    return min(total, LIMIT)
'''


def changes(source: str) -> list[str]:
    return [mutant.change for mutant in mutants(source, "clamp.py")]


def test_mutants_are_the_small_mistakes_that_one_makes():
    found = changes(SOURCE)
    for change in (
        "3 -> 4",
        "2.0 -> 4.0",
        "False -> True",
        "< -> <= in x < 0",
        "or -> and in x < 0 or not strict",
        "not strict -> (strict)",
        'raise ValueError("negative" + "!") -> pass',
        "with guard() -> without",
        "* -> / in -x * most",
        "-x -> (x)",
        "-x * most -> None",
        "total += 1 -> pass",
        "+= -> -= in total += 1",
        "min(total, LIMIT) -> max",
        "min(total, LIMIT) -> None",
    ):
        assert change in found
    assert not [change for change in found if "Text" in change or "comment" in change or "float:" in change]
    assert not [change for change in found if change.startswith('"negative"')], "the wording of errors is left alone"


def test_each_is_one_change_and_is_still_python():
    for mutant in mutants(SOURCE, "clamp.py"):
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        compile(changed, "clamp.py", "exec")
        lines = [i for i, (a, b) in enumerate(zip(SOURCE.splitlines(), changed.splitlines(), strict=True), 1) if a != b]
        assert len(lines) == 1 and mutant.first <= lines[0] <= mutant.last


def test_the_score_leaves_out_what_is_equivalent_and_a_sample_has_an_interval():
    made = mutants(SOURCE, "clamp.py")
    kinds = ["killed", "survived", "timeout", "survived"]
    verdicts = list(zip(made, kinds, strict=False))
    rows = records("toy", made, verdicts, {made[3].name})
    low, high = wilson(2, 3)
    share = (f"{2 / 3:.4f}", f"{low:.4f}", f"{high:.4f}")
    assert rows[-1] == ("toy", "all", str(len(made)), "4", "1", "1", "1", "1", *share)
    assert rows[0][1] == "clamp.py"
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)


def test_equivalent_mutants_are_listed_by_name_or_with_gaps():
    listed = Equivalent("# a comment\n= why\na.py | f | * -> / in x * y | 1\n\n= another\nb.py | … | 1 -> 2 | …\n")
    for name in ("a.py | f | * -> / in x * y | 1", "b.py | g.h | 1 -> 2 | 7"):
        assert name in listed
    for name in ("a.py | f | * -> / in x * y | 2", "b.py | g.h | 1 -> 3 | 7", "# a comment", "why", ""):
        assert name not in listed
    assert "" not in Equivalent("")


def test_every_name_in_the_list_is_a_mutant_of_the_code_as_it_is():
    """Else an equivalent mutant whose file was moved would count as one that survived."""
    base = ROOT / "src/groupwise"
    made = [m.name for p in NOT_HERE for f in _files(p) for m in mutants((base / f).read_text(), f)]
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line.strip() and line[0] not in "#="]
    assert len(lines) > 30
    assert not [line for line in lines if not any(name in Equivalent(line) for name in made)]


@pytest.mark.slow
def test_a_tested_mistake_is_killed_and_an_untested_one_survives(tmp_path):
    """A toy checkout, from nothing: the class body, the decorated function and the loop without end are reached too."""
    (tmp_path / "src/groupwise/toy").mkdir(parents=True)
    (tmp_path / "src/groupwise/__init__.py").write_text("")
    (tmp_path / "src/groupwise/toy/__init__.py").write_text("")
    (tmp_path / "src/groupwise/toy/sums.py").write_text(
        "import functools\n\n\nclass Sizes:\n    base = 5\n\n\n"
        "@functools.lru_cache\ndef tested(x):\n    while x < 4:\n        x += 1\n    return x\n\n\n"
        "def untested(x):\n    return x * 2\n"
    )
    (tmp_path / "tests/toy").mkdir(parents=True)
    (tmp_path / "tests/toy/test_sums.py").write_text(
        "from groupwise.toy.sums import Sizes, tested, untested\n\n\ndef test_it():\n"
        "    assert tested(1) == 4 and tested(7) == 7\n    untested(3)\n\n\n"
        "def test_sizes():\n    assert Sizes.base == 5\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow"]\n')
    script = (
        "import sys; from pathlib import Path; from trust.mutation import __main__ as m\n"
        "m.ROOT = Path(sys.argv[1]); m.RESULTS = m.ROOT / 'results'\n"
        "m.NOT_HERE['toy'] = m.NO_TESTS['toy'] = (); m.PATIENCE = 2\n"
        "sys.exit(m.main(['toy']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    survived = [line for line in ran.stderr.splitlines() if line.startswith("survived:")]
    assert sorted(line.split(" | ")[2] for line in survived) == ["* -> / in x * 2", "2 -> 3", "x * 2 -> None"]
    with (tmp_path / "results/mutation.csv").open(newline="") as stream:
        (row,) = [row for row in csv.DictReader(stream) if row["file"] == "all"]
    assert row["mutants"] == row["tried"] and int(row["timeout"]) >= 1 and row["survived"] == "3"
