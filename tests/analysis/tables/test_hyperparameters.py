"""Our configurations have the settings of the paper: its fixed and selected values, and a value of each grid."""

from functools import cache

import pytest

from groupwise.analysis.results import HYPERPARAMETERS, read_paper
from groupwise.config.compose import compose_run
from groupwise.config.schema import RunConfig
from tests.analysis.tables.conftest import ROOT

SST2_SIZE = 67349
"""Training examples of SST-2, by which a sample rate becomes a batch size."""


@cache
def composed(cell: str) -> RunConfig:
    return compose_run(cell.split(), ROOT / "conf")


def ours(config: RunConfig, key: str) -> float:
    if key == "train.batch_size" and config.train.batch_size is None:
        return round(config.train.sample_rate * SST2_SIZE)
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def settings() -> list[object]:
    found = []
    for name in HYPERPARAMETERS:
        table = read_paper(name, ROOT / "results" / "paper")
        for (row, column), group in table[table["cell"] != ""].groupby(["row", "column"], sort=False):
            chosen = group[~group["note"].str.startswith("grid")]
            allowed = (chosen if len(chosen) else group)["value"].tolist()
            found.append(
                pytest.param(group.iloc[0]["cell"], group.iloc[0]["metric"], allowed, id=f"{name}-{row}-{column}")
            )
    return found


@pytest.mark.parametrize(("cell", "key", "allowed"), settings())
def test_setting_is_that_of_the_paper(cell, key, allowed):
    value = ours(composed(cell), key)
    assert any(value == pytest.approx(number, rel=1e-9) for number in allowed), f"{key}={value}, not of {allowed}"
