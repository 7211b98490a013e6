"""A sweep ends with a table of its cells."""

from groupwise.sweeps.collect import table
from groupwise.sweeps.status import State

SHARED = "task=cifar scale=mini model.width=4"
NAMES = [f"{SHARED} clip={clip} seed={seed}" for clip in ("flat", "adaptive_layer") for seed in (0, 1)]
ROW = {"valid/accuracy": 50.12345, "plan.spent_epsilon": 7.99612, "plan.private": True}
STATES = [State(NAMES[0], "done"), State(NAMES[1], "failed"), State(NAMES[2], "interrupted"), State(NAMES[3], "done")]


def test_state_metric_epsilon_and_what_tells_a_cell_apart():
    shared, head, *lines = table(STATES, [ROW, {}, {}, ROW])
    assert shared == f"Cells of {SHARED}"
    assert head.split() == ["state", "valid/accuracy", "epsilon", "cell"]
    assert [line.split() for line in lines] == [
        ["done", "50.12", "7.996", "clip=flat", "seed=0"],
        ["failed", "clip=flat", "seed=1"],
        ["interrupted", "clip=adaptive_layer", "seed=0"],
        ["done", "50.12", "7.996", "clip=adaptive_layer", "seed=1"],
    ]
    assert len({line.index("clip=") for line in lines}) == 1
    assert {len(line[: line.index("clip=")].rstrip()) for line in (lines[0], lines[3])} == {head.index("epsilon") + 7}


def test_what_is_no_guarantee_is_marked():
    lines = table(STATES[:2], [ROW | {"plan.private": False}, ROW])
    assert "7.996*" in lines[2] and "7.996*" not in lines[3]
    assert lines[-1] == "* not a guarantee"
    endless = table(STATES[:1], [ROW | {"plan.spent_epsilon": "inf", "plan.private": False}])
    assert "inf" in endless[1] and "*" not in endless[-1]


def test_where_nothing_is_done_the_failures_say_it_all():
    assert table(STATES, [{}, {}, {}, {}]) == []
