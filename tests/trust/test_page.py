"""docs/trust.md and docs/models.md show what results/trust holds, and nothing else."""

from pathlib import Path

import pytest

from groupwise.errors import UserError
from trust.page import PAGES, TABLES, audit_summary, audits, fill

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trust.md"
ROW = {"mode": "flat", "model": "layers", "noise": "global", "quantile_budget": "0", "dropout": "0", "design": "full"}


def row(claimed: str, lower: str, gaussian: str = "") -> dict[str, str]:
    return {**ROW, "epsilon_claimed": claimed, "epsilon_lower": lower, "epsilon_lower_gaussian": gaussian}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_pages_show_what_the_files_hold(page: Path) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT / "results" / "trust", page) == text


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert fill(PAGE.read_text(), tmp_path).count("Not measured yet.") == len(TABLES)


def test_a_page_without_a_place_for_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="markers"):
        fill("# nothing", tmp_path)


def test_a_bound_above_its_claim_is_counted_whichever_of_the_two_it_is() -> None:
    rows = [row("1", "0.5", "0.9"), row("1", "1.1"), row("8", "4", "8.1")]
    assert audit_summary(rows).startswith("3 audits, 2 above their claim.")
    assert "ε = 1: 110% (90%); ε = 8: 50% (101%)" in audit_summary(rows)


def test_each_budget_has_its_column() -> None:
    rows = [row("1", "0.5", "0.9"), {**row("8", "4"), "mode": "ghost"}, {**row("8", "3"), "dropout": "0.1"}]
    assert "| `flat` | layers | global | 0 | 0.5 (0.9) | – |" in audits(rows)
    assert "| `flat` | layers, dropout 0.1 | global | 0 | – | 3 |" in audits(rows)
