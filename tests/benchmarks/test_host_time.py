"""The host time of a clipped layer: its number of operations stays within a budget."""

import re

import pytest

from benchmarks.host_time import CHAINS, METHODS, cost, main
from benchmarks.host_time import Options as HostTime

MOST = {"linear": 26, "linear on 6 tokens": 30, "convolution": 32, "LayerNorm": 27, "GroupNorm": 29}
"""Operations per layer, views included, forward and backward; plain training has 4 to 16."""


@pytest.mark.parametrize("chain", CHAINS)
def test_operations_per_layer_stay_within_budget(chain):
    found = cost(chain, HostTime(turns=1))
    assert set(found) == set(METHODS)
    assert found["none"].operations < min(found["flat"].operations, found["per layer"].operations)
    assert max(found["flat"].operations, found["per layer"].operations) <= MOST[chain]
    assert found["none"].ratio == 1


def test_command_prints_a_line_per_chain(capsys):
    assert main(["layers=2", "turns=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in lines[2:-2]] == list(CHAINS)
    assert re.fullmatch(r"a pass through one linear layer, flat: \d+ functions in \d+ files", lines[-1])
    assert main(["turns=0"]) == 2
    assert capsys.readouterr().err.startswith("error: turns=0")
