"""Where time goes: every layer and every operation of a method beside plain training's."""

from functools import partial

import pytest

from benchmarks.breakdown import main
from benchmarks.layer_costs import costs
from benchmarks.workloads import build


def test_operations_and_the_budget_of_plain_and_private_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny=true", "workload=mlp", "method=adaptive_layer", "steps=1", "rounds=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mlp (tiny)" and lines[1].split()[-5:] == ["layers", "plain", "private", "floor", "over"]
    head = next(
        place for place, line in enumerate(lines) if line.split() == ["ms", "a", "step", "none", "adaptive_layer"]
    )
    layers = sum(line.startswith("Linear") for line in lines[:head])
    assert layers == 3 and any(line.startswith("noise and division") for line in lines[:head])
    clipping = next(line for line in lines[head:] if line.startswith("LayerFunctionBackward"))
    assert float(clipping.split()[-2]) == 0 < float(clipping.split()[-1])


def test_layers_of_one_size_are_timed_once_and_the_rest_is_what_they_leave() -> None:
    found = costs(partial(build, "gpt2_untied", tiny=True), "flat", 1, "cpu")
    layers = {cost.name: cost.count for cost in found.layers}
    assert layers["Conv1D 48×144 on 4×7×48"] == 2 and layers["LayerNorm on 4×7×48"] == 5
    assert layers["Embedding 1024×48 on 4×7"] == 1 and layers["Linear 97×48 on 4×7×48"] == 1
    assert found.outside.private == pytest.approx(found.step.private - sum(cost.private for cost in found.layers))
    norms = next(cost for cost in found.layers if cost.name.startswith("LayerNorm"))
    products = next(cost for cost in found.layers if cost.name.startswith("Conv1D"))
    assert norms.floor == norms.plain and products.floor > products.plain  # no operation of a LayerNorm is counted
    assert [cost.floor for cost in found.once[:2]] == [0.0, 0.0]
