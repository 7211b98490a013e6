"""The numbers of the paper are complete: counts and sums of each table were taken independently from the LaTeX."""

import pytest

from groupwise.analysis.results import HYPERPARAMETERS, MINUS, TABLES, Folders, read_paper, settings_of
from groupwise.errors import UserError

PAPER = Folders.of_checkout().paper
CHECK = {  # table: number of values, their sum, number of standard deviations, their sum
    "fixed_per_layer": (8, 627.2, 0, 0.0),
    "cifar": (16, 1031.2, 0, 0.0),
    "glue": (56, 4887.88, 0, 0.0),
    "sst2_epochs": (32, 2959.23, 32, 17.58),
    "table2text": (20, 1096.589, 0, 0.0),
    "samsum": (30, 885.1, 0, 0.0),
    "noise_allocation": (12, 1085.8, 0, 0.0),
    "adaptivity": (22, 1149.8, 14, 9.6),
    "hyperparameters_cifar": (15, 4416.11, 0, 0.0),
    "hyperparameters_glue": (50, 14368.342801, 0, 0.0),
    "hyperparameters_gpt2": (16, 2529.62100001, 0, 0.0),
}


@pytest.mark.parametrize("name", [*TABLES, *HYPERPARAMETERS])
def test_every_number_of_the_paper_is_present(name):
    table = read_paper(name, PAPER)
    values, stds = table["value"].dropna(), table["std"].dropna()
    count, total, std_count, std_total = CHECK[name]
    assert (len(values), len(stds)) == (count, std_count)
    assert values.sum() == pytest.approx(total, abs=1e-9)
    assert stds.sum() == pytest.approx(std_total, abs=1e-9)
    assert (table["table"] == name).all()


@pytest.mark.parametrize("name", TABLES)
def test_line_has_a_cell_or_a_note(name):
    for line in read_paper(name, PAPER).itertuples():
        assert line.cell or line.note
        assert line.metric
        for selector in line.cell.split(MINUS):
            settings_of(selector)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_setting_is_fixed_or_a_grid_with_at_most_one_selected(name):
    table = read_paper(name, PAPER)
    kind = table["note"].str.split(";").str[0]
    assert set(kind) <= {"fixed", "grid", "selected"}
    for _, group in table.assign(kind=kind).groupby(["row", "column"]):
        assert len(group) == 1 if "fixed" in set(group["kind"]) else len(group) > 1
        assert (group["kind"] == "selected").sum() <= 1


def test_unknown_table_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no table cifer \(did you mean cifar\?\): .*glue"):
        read_paper("cifer", PAPER)
    with pytest.raises(UserError, match=r"not in .*cifar\.csv"):
        read_paper("cifar", tmp_path)
