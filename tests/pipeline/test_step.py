"""Three steps of a pipeline match a float64 loop over single examples, clipped stage by stage."""

import math
import re
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.pipeline.split import choose_ranges
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import (
    BATCHES,
    EXPECTED,
    LEARNING_RATE,
    QUANTILE,
    STEP,
    THRESHOLDS,
    Case,
    Texts,
    make_model,
    make_trainer,
)

PRODUCT = [
    Case(model, stages, "device", policy, again)
    for stages, model, policy, again in product((2, 4), ("gpt2", "lora"), ("fixed", "adaptive"), (False, True))
]
FIRST = {"gpt2": (2, "fixed", False), "lora": (2, "adaptive", True)}
"""One fast case of each model. The cases that differ from it in all three settings are fast too: all pairs occur."""


def of_pairs(case: Case) -> bool:
    """Whether a case is one of those that cover every pair of settings; the others of `PRODUCT` are slow."""
    own = (case.stages, case.policy, case.rematerialize)
    return len({value == first for value, first in zip(own, FIRST[case.model], strict=True)}) == 1


CASES = [
    *filter(of_pairs, PRODUCT),
    *(
        Case(model, stages, grouping, "adaptive", again)
        for stages, model, grouping, again in (
            (2, "gpt2", "layer", False),
            (2, "gpt2", "flat", True),
            (2, "lora", "flat", False),
            (2, "lora", "none", False),
            (4, "gpt2", "layer", True),
            (4, "gpt2", "flat", False),
            (4, "lora", "flat", False),
            (4, "gpt2", "none", True),
        )
    ),
]
REPLICATED = [Case(grouping=grouping, policy="adaptive") for grouping in ("device", "flat", "none")]
"""Two stages on four processes: two replicas of the pipeline."""


def run_cases(rank: int, world: int, by_stages: dict[int, list[Case]]) -> list[tuple[dict[str, Tensor], list, list]]:
    """The results of each case on this process: parameters by their names in the whole model, thresholds, reports."""
    found = []
    for stages, cases in by_stages.items():
        ranks = Ranks(stages)
        for case in cases:
            found.append(run_case(case, ranks))
    return found


def run_case(case: Case, ranks: Ranks) -> tuple[dict[str, Tensor], list, list]:
    """Three steps of one case on this process."""
    trainer = make_trainer(case, ranks)
    reports = [trainer.report(ranks.agree(*trainer.step(step))) for step in range(len(BATCHES))]
    stage = trainer.runner.stage
    names = stage.names
    weights = {names[name]: p.detach() for name, p in stage.named_parameters() if p.requires_grad}
    thresholds = [] if trainer.private.thresholds is None else trainer.private.thresholds.clip_thresholds.tolist()
    return weights, thresholds, reports


@cache
def reference(case: Case) -> tuple[dict[str, Tensor], list[float], list[dict[str, float]]]:
    """Parameters, thresholds and what was clipped after the same steps, one example at a time on one process."""
    model = make_model(case)
    ranges = choose_ranges(model, case.stages)
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    group_of = {name: _group(case, ranges, name) for name in trains}
    thresholds = {group: THRESHOLDS[case.model] / math.sqrt(len(set(group_of.values()))) for group in group_of.values()}
    reports = []
    for batch in BATCHES:
        sums = {name: torch.zeros_like(p) for name, p in trains.items()}
        within, loss_sum = Counter(), 0.0
        for example in batch:
            loss = _loss(case, model, example)
            loss_sum += loss.item()
            gradients = dict(zip(trains, torch.autograd.grad(loss, list(trains.values())), strict=True))
            for group, threshold in thresholds.items():
                names = [name for name in trains if group_of[name] == group]
                norm = math.sqrt(sum(float(gradients[name].square().sum()) for name in names))
                factor = 1.0 if case.grouping == "none" else min(1.0, threshold / norm)
                within[group] += norm <= threshold
                for name in names:
                    sums[name] += factor * gradients[name]
        with torch.no_grad():
            for name, parameter in trains.items():
                parameter -= LEARNING_RATE * sums[name] / EXPECTED
        reports.append(
            {
                "nonprivate/loss": loss_sum / max(len(batch), 1),
                "nonprivate/clipped": 1 - sum(within.values()) / len(thresholds) / len(batch) if batch else 0,
            }
        )
        if case.policy == "adaptive":
            for group in thresholds:
                below = (within[group] - len(batch) / 2) / EXPECTED + 0.5
                thresholds[group] *= math.exp(-STEP * (below - QUANTILE))
    return trains, list(thresholds.values()), reports


def _group(case: Case, ranges: tuple[tuple[int, int], ...], name: str) -> str:
    block = re.search(r"\bh\.(\d+)\.", name)
    if case.grouping == "flat":
        return "all"
    if case.grouping == "layer":
        return name.rpartition(".")[0]
    if block:
        return str(next(k for k, (start, stop) in enumerate(ranges) if start <= int(block.group(1)) < stop))
    return "0" if any(part in name for part in ("wte", "wpe")) else str(len(ranges) - 1)


def _loss(case: Case, model: nn.Module, example: int) -> Tensor:
    data = Texts()
    tokens, start = torch.as_tensor(data.rows[example]), int(data.starts[example])
    return F.cross_entropy(model(tokens[None]).logits[0, start - 1 : -1], tokens[start:])


def _plain(case: Case) -> Case:
    """The settings that the reference depends on."""
    return Case(case.model, case.stages, grouping=case.grouping, policy=case.policy)


def _check(case: Case, ranks: list) -> None:
    weights, thresholds, reports = reference(_plain(case))
    got: dict[str, Tensor] = {}
    for own, _, _ in ranks:
        got |= own
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{case} {n}: {m}")
    if case.grouping != "none":
        found = [number for _, own, _ in (ranks[:1] if case.grouping == "flat" else ranks) for number in own]
        assert sorted(found) == pytest.approx(sorted(thresholds), rel=1e-9)
    for _, _, reported in ranks:
        for report, expected in zip(reported, reports, strict=True):
            for key in expected if case.grouping != "none" else ("nonprivate/loss",):
                assert report[key] == pytest.approx(expected[key], abs=1e-9), (case, key)


def test_three_steps_on_two_processes_equal_the_loop_over_single_examples():
    cases = [case for case in CASES if case.stages == 2]
    for case, *ranks in zip(cases, *run_ranks(run_cases, 2, {2: cases}), strict=True):
        _check(case, ranks)


@pytest.mark.slow
def test_three_steps_on_four_processes_equal_the_loop_over_single_examples():
    cases = [case for case in CASES if case.stages == 4]
    found = run_ranks(run_cases, 4, {4: cases, 2: REPLICATED})
    for case, *ranks in zip(cases, *(own[: len(cases)] for own in found), strict=True):
        _check(case, ranks)
    for case, *ranks in zip(REPLICATED, *(own[len(cases) :] for own in found), strict=True):
        _check(case, ranks[:2])  # the other replica has the same weights
        for own, other in zip(ranks[:2], ranks[2:], strict=True):
            assert all(torch.equal(weight, other[0][name]) for name, weight in own[0].items()), case


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_three_steps_of_all_other_cases_equal_the_loop_over_single_examples(stages):
    cases = [case for case in PRODUCT if case.stages == stages and not of_pairs(case)]
    for case, *ranks in zip(cases, *run_ranks(run_cases, stages, {stages: cases}), strict=True):
        _check(case, ranks)


def test_the_reference_clips_some_examples_and_not_others():
    for case in {_plain(case) for case in CASES if case.grouping != "none"}:
        clipped = [report["nonprivate/clipped"] for report in reference(case)[2]]
        assert any(0 < share < 1 for share in clipped), (case, clipped)
