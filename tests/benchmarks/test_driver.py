"""The driver with stub processes: interleaved rounds, memory formats of other libraries, refusals."""

from typing import Any

import pytest

from benchmarks import driver
from benchmarks.job import Job
from groupwise.errors import UserError
from tests.benchmarks.stubs import TIMES, answering

asked: list[tuple[str, str, str]] = []


facts: dict[tuple[str, str], dict[str, Any]] = {}
"""(method, format) -> changes to the usual answer of `measure`."""
dies_at: dict[str, int] = {}
"""Method -> the round, from 1, at which it is killed."""


def stub_answer(job: Job, do: str, steps: int = 0) -> dict[str, Any]:
    """The answer of a stub process."""
    asked.append((do, job.method, job.memory_format))
    if do == "measure":
        usual = {"peak_bytes": 10, "flops": 5, "seconds": 1.0, "sums": 2.0, "parameters": 7}
        return {**usual, "batch": 4, "layers": 2, **facts.get((job.method, job.memory_format), {})}
    return {"refused": "killed"} if asked.count(asked[-1]) == dies_at.get(job.method) else TIMES


@pytest.fixture(autouse=True)
def clear_records() -> None:
    for each in (asked, facts, dies_at):
        each.clear()


def rows(workload: str, *methods: str, rounds: int = 2) -> list[dict[str, Any]]:
    return driver.run(Job(workload, "none"), methods, rounds, 3, 60, answering(stub_answer))


def test_rounds_are_interleaved() -> None:
    found = rows("mlp", "none", "flat")
    assert [method for do, method, _ in asked if do == "round"] == ["none", "flat", "none", "flat"]
    assert [(row["method"], row["round"]) for row in found] == [("none", 0), ("flat", 0), ("none", 1), ("flat", 1)]
    assert found[0]["examples_per_second"] == 4.0 and found[0]["steps"] == 3 and found[0]["status"] == "ok"


@pytest.mark.parametrize(
    ("contiguous", "last", "chosen"),
    [
        ({"seconds": 2.0}, {"seconds": 1.0}, "channels_last"),
        ({"seconds": 1.0}, {"seconds": 2.0}, "contiguous"),
        ({"seconds": 2.0}, {"seconds": 1.0, "sums": 2.1}, "contiguous"),  # fast and wrong
        ({"refused": "no"}, {"seconds": 1.0}, "channels_last"),
        ({"seconds": 2.0}, {"refused": "no"}, "contiguous"),
    ],
)
def test_peer_is_timed_in_its_fastest_correct_format(contiguous: dict, last: dict, chosen: str) -> None:
    facts.update({("opacus_hooks", "contiguous"): contiguous, ("opacus_hooks", "channels_last"): last})
    found = rows("wrn16_4_conv", "none", "opacus_hooks", rounds=1)
    assert [row["memory_format"] for row in found if row["method"] == "opacus_hooks"] == [chosen]


def test_refused_method_gets_one_row_and_others_continue() -> None:
    facts.update({("opacus_ghost", "contiguous"): {"refused": "tied weights"}})
    found = rows("gpt2", "none", "opacus_ghost")
    refused = [row for row in found if row["method"] == "opacus_ghost"]
    assert [row["status"] for row in refused] == ["refused: tied weights"]
    assert refused[0]["cpu_seconds"] is None and (refused[0]["batch"], refused[0]["layers"]) == (4, 2)
    assert [row["status"] for row in found if row["method"] == "none"] == ["ok", "ok"]


def test_killed_process_ends_only_its_own_method() -> None:
    dies_at["flat"] = 2
    found = rows("mlp", "none", "flat", rounds=3)
    flat = [(row["round"], row["status"]) for row in found if row["method"] == "flat"]
    assert flat == [(0, "ok"), (1, "refused: killed")]
    assert [row["round"] for row in found if row["method"] == "none"] == [0, 1, 2]


def test_refused_plain_training_raises() -> None:
    facts.update({("none", "contiguous"): {"refused": "out of memory"}})
    with pytest.raises(UserError, match="out of memory"):
        rows("mlp", "none", "flat")
