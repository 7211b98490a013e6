"""docs/trust.md, docs/models.md and the pages beside the CSVs show what results/trust holds, and nothing else."""

from pathlib import Path

import pytest

from groupwise.errors import UserError
from trust.page import EVIDENCE, NOTHING, Evidence, audit_summary, faults_summary, fill, full, planted_summary

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trust.md"
ROW = {"mode": "flat", "model": "layers", "noise": "global", "quantile_budget": "0", "dropout": "0", "design": "full"}


def row(claimed: str, lower: str) -> dict[str, str]:
    return {**ROW, "epsilon_claimed": claimed, "epsilon_lower": lower}


@pytest.mark.parametrize("page", sorted({evidence.page for evidence in EVIDENCE}), ids=str)
def test_the_pages_show_what_the_files_hold(page: Path) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT / "results" / "trust", page) == text, "run python -m trust.page"


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.name)
def test_the_tables_beside_the_files_show_what_these_hold(evidence: Evidence) -> None:
    results = ROOT / "results" / "trust"
    assert (results / f"{evidence.name}.md").read_text() == full(evidence, results), "run python -m trust.page"
    assert f"results/trust/{evidence.name}.md" in (ROOT / evidence.page).read_text()


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert fill(PAGE.read_text(), tmp_path).count(NOTHING) == len(
        [one for one in EVIDENCE if one.page.name == PAGE.name]
    )
    assert NOTHING in full(EVIDENCE[0], tmp_path)


def test_a_page_without_a_place_for_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="markers"):
        fill("# nothing", tmp_path)


def test_a_bound_above_its_claim_is_counted() -> None:
    rows = [row("1", "0.5"), row("1", "1.1"), row("8", "4")]
    assert audit_summary(rows).startswith("3 audits, 1 above their claim.")
    assert "ε = 1: 110%; ε = 8: 50%" in audit_summary(rows)


def test_a_bug_that_was_missed_is_not_counted_as_caught() -> None:
    caught = {
        "bug": "no noise",
        "claimed_epsilon": "1",
        "bug_epsilon": "6.3",
        "correct_epsilon": "0.25",
        "caught": "yes",
    }
    missed = {**caught, "bug": "too small a σ", "bug_epsilon": "0.8", "caught": "no"}
    said = planted_summary([caught, missed])
    assert (
        said.startswith("2 bugs, 1 caught.") and "ε ≥ 0.8 where 1 is claimed (too small a σ)" in said and "25%" in said
    )


def test_what_was_lost_is_counted() -> None:
    said = faults_summary([{"tried": "3", "lost": "1"}, {"tried": "2", "lost": "0"}])
    assert said == "2 kinds of fault, tried 5 times: 1 lost."
