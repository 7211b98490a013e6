"""The paper's claims as differences between cells, from `results/paper/claims.csv`.

claim, on
    The paper's statement, and the tasks or models it is about.
sweep, where, metric
    The sweep whose cells are compared, the settings that they share, and the column of the measured rows.
plus, minus
    Settings of the cells that are added and of those that are subtracted.
kind
    The claimed difference, one of `KINDS`.
"""

from dataclasses import dataclass

from groupwise.analysis.results import settings_of
from groupwise.analysis.statistics import MARGIN, Contrast
from groupwise.checkout import CHECKOUT
from groupwise.rows import read_table

LESS, MORE, ALIKE, NO_WORSE = "less", "more", "alike", "no worse"
KINDS = {
    LESS: "the difference is below zero",
    MORE: "the difference is above zero",
    ALIKE: f"the difference is within ±{MARGIN:g} point",
    NO_WORSE: f"the difference is above −{MARGIN:g} point",
}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and the difference that tests it."""

    says: str
    on: str
    contrast: Contrast
    kind: str

    @property
    def ours(self) -> bool:
        """Whether its runs use a network that is not the paper's."""
        return self.contrast.sweep in OURS


SEARCH = "search_"
"""Prefix of the sweeps that select hyperparameters; their rows are not evidence for claims."""
OURS = ("scatter_cnn", "lite0_cifar", "nonprivate_sst2", "cifar_long")
"""Sweeps with a model that is not the paper's at any scale."""


def _claim(row: dict[str, str]) -> Claim:
    added, subtracted = (tuple(settings_of(word) for word in row[side].split()) for side in ("plus", "minus"))
    contrast = Contrast(row["sweep"], added, subtracted, settings_of(row["where"]), row["metric"])
    return Claim(row["claim"], row["on"], contrast, row["kind"])


CLAIMS = tuple(map(_claim, read_table(CHECKOUT / "results" / "paper" / "claims.csv")))
