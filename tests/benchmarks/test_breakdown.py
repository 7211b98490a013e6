"""The profile: every method's operations beside plain training's."""

import pytest

from benchmarks.breakdown import main


def test_operations_of_plain_and_private_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny=true", "workload=mlp", "method=adaptive_layer", "steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mlp" and lines[1].split() == ["ms", "a", "step", "none", "adaptive_layer"]
    clipping = next(line for line in lines if line.startswith("LayerFunctionBackward"))
    assert float(clipping.split()[-2]) == 0 < float(clipping.split()[-1])


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload=mpl"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
