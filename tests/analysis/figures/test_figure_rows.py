"""Rows of figures: faulty rows are refused in one sentence, and means have t-intervals."""

from pathlib import Path

import pandas as pd
import pytest

from groupwise.analysis.figure_style import seeds_in_words, summary
from groupwise.analysis.figures import make
from groupwise.errors import UserError


def change(path: Path, **columns: object) -> None:
    """Change values in the first row of a CSV."""
    frame = pd.read_csv(path, dtype=str)
    for name, value in columns.items():
        frame.loc[0, name] = value
    frame.to_csv(path, index=False)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("norm", "inf", "no finite norm"),
        ("hash", "0" * 64, "of a run that was not measured"),
        ("example", "5892", "twice"),
    ],
)
def test_corrupted_row_of_a_run_is_refused(folders, column, value, words):
    change(folders.measured / "gradnorm_cifar_mini_norms.csv", **{column: value})
    with pytest.raises(UserError, match=words):
        make("gradnorm_cifar", folders)


def test_run_without_its_rows_is_refused(folders):
    (folders.measured / "gradnorm_cifar_mini_norms.csv").unlink()
    with pytest.raises(UserError, match=r"groupwise.sweeps.gradient_norms gradnorm_cifar scale=mini"):
        make("gradnorm_cifar", folders)


def test_means_have_t_intervals():
    rows = pd.DataFrame({"clip": ["flat"] * 3 + ["ghost"], "x": [1.0, 2.0, 3.0, 7.0]})
    table = summary(rows, ["clip"], "x").set_index("clip")
    assert table.loc["flat", "mean"] == 2 and table.loc["flat", "n"] == 3
    assert table.loc["flat", "high"] == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)  # t(2) at 97.5 %
    assert pd.isna(table.loc["ghost", "low"])
    assert seeds_in_words(table["n"]).endswith("over 1 to 3 seeds")
    assert seeds_in_words(pd.Series([1, 1])) == "One seed, so no interval"
