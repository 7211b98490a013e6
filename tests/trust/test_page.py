"""docs/trust.md, docs/models.md and the pages beside the CSVs agree with the rows in results/trust."""

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
def test_documents_show_the_committed_rows(page: Path) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT / "results" / "trust", page) == text, "run python -m trust.page"


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.name)
def test_pages_beside_the_files_show_the_committed_rows(evidence: Evidence) -> None:
    results = ROOT / "results" / "trust"
    assert (results / f"{evidence.name}.md").read_text() == full(evidence, results), "run python -m trust.page"
    assert f"results/trust/{evidence.name}.md" in (ROOT / evidence.page).read_text()


def test_missing_file_is_shown_as_not_measured(tmp_path: Path) -> None:
    assert fill(PAGE.read_text(), tmp_path).count(NOTHING) == sum(one.page.name == PAGE.name for one in EVIDENCE)
    assert NOTHING in full(EVIDENCE[0], tmp_path)


def test_page_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="markers"):
        fill("# nothing", tmp_path)


def test_audit_summary_counts_bounds_above_their_claim() -> None:
    rows = [row("1", "0.5"), row("1", "1.1"), row("8", "4")]
    assert audit_summary(rows).startswith("3 audits, 1 above their claim.")
    assert "ε = 1: 110%; ε = 8: 50%" in audit_summary(rows)


def test_planted_summary_counts_only_caught_bugs() -> None:
    bounds = {"claimed_epsilon": "1", "bug_epsilon": "6.3", "correct_epsilon": "0.25"}
    caught = {"bug": "no noise", "caught": "yes", **bounds}
    missed = {**caught, "bug": "too small a σ", "bug_epsilon": "0.8", "caught": "no"}
    text = planted_summary([caught, missed])
    assert text.startswith("2 bugs, 1 caught.") and "25.0%" in text
    assert "ε ≥ 0.8 where 1 is claimed (too small a σ)" in text


def test_faults_summary_counts_lost_trials() -> None:
    text = faults_summary([{"tried": tried, "lost": lost} for tried, lost in (("3", "1"), ("2", "0"), ("0", "0"))])
    assert text == "2 kinds of fault, tried 5 times: 1 lost."
