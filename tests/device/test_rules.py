"""Every layer rule on a GPU matches a float64 loop, in both memory formats, in float32 and bfloat16 autocast."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.factors import Factors, add_weighed_rows
from groupwise.clipping.precision import full_float32
from groupwise.clipping.reference import clipped_sums
from tests.clipping.conftest import BATCH, CASES, make_case

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:groupwise has no rule")]

MODES = {"layer": (per_layer, "bookkeeping"), "flat": (flat, "bookkeeping"), "ghost": (flat, "ghost")}
ERRORS = {"float32": (1e-4, 1e-4), "bfloat16": (0.06, 0.06)}
"""Relative tolerances: of sums (to threshold times the root of the batch size) and of norms."""
SENSITIVE, COARSE = ("ws_conv_gain", "group_norm_2d"), 0.3
"""A nearly constant filter and groups of three numbers, whose norms bfloat16 rounding changes by a fifth."""
ROUNDED_UP, SLACK = ("frozen_ws_weight",), 5e-4
"""A gain whose norm is small compared with the rounding of its inner products."""
IMAGES = [name for name, (_, inputs) in CASES.items() if inputs().dim() == 4 and inputs().is_floating_point()]
LAYOUTS = [(name, "contiguous") for name in CASES] + [(name, "channels_last") for name in IMAGES]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: value)
def test_sums_and_norms_match_a_float64_loop(device: torch.device, name: str, layout: str, dtype: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    case = make_case(name)
    truths = {}
    for mode, (partition_of, _) in MODES.items():
        partition = partition_of(case.model)
        norms = clipped_sums(case.model, case.loss_of, range(BATCH), partition, [1.0] * len(partition)).norms
        thresholds = [max(float(row.median()), 1e-3) for row in norms]
        truths[mode] = (
            partition,
            thresholds,
            clipped_sums(case.model, case.loss_of, range(BATCH), partition, thresholds),
        )
    torch.set_default_dtype(torch.float32)
    inputs = case.inputs.to(device, torch.float32 if case.inputs.is_floating_point() else None)
    targets = case.targets.to(device, torch.float32)
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    of_sums, of_norms = (COARSE, COARSE) if dtype == "bfloat16" and name in SENSITIVE else ERRORS[dtype]
    if dtype == "float32" and name in ROUNDED_UP:
        of_sums, of_norms = SLACK, SLACK
    for mode, (partition, thresholds, truth) in truths.items():
        model = copy.deepcopy(case.model).to(device, torch.float32)
        if layout == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        precise = torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()

        def losses_of(rows: Sequence[int], model: nn.Module = model, precise: Any = precise) -> Tensor:
            indices = list(rows)
            with precise:
                outputs = model(inputs[indices].contiguous(memory_format=memory))
            return F.mse_loss(outputs.float().flatten(1), targets[indices], reduction="none").sum(1)

        with full_float32(), device, attach(model, partition, thresholds, norms=MODES[mode][1]) as engine:
            engine.trace(losses_of, range(BATCH))
            losses = engine.losses(losses_of, range(BATCH))
            engine.backward(losses)
            found = engine.per_example_norms.cpu().double()
            torch.testing.assert_close(found, truth.norms, rtol=of_norms, atol=1e-3 * float(truth.norms.max()))
            names = {parameter: name for name, parameter in model.named_parameters()}
            for group, threshold in zip(engine.groups, thresholds, strict=True):
                for parameter in group.parameters:
                    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
                    error = float((parameter.grad.cpu().double() - truth.sums[names[parameter]]).norm())
                    assert error <= of_sums * threshold * BATCH**0.5, (mode, names[parameter], error, threshold)


def test_weighted_sum_of_large_rows_ignores_dropped_examples(device: torch.device) -> None:
    rows, weights = torch.randn(96, 3, 7001, dtype=torch.float64), torch.rand(96, dtype=torch.float64)
    rows[5], rows[11, 0, 3], weights[[5, 11]] = float("nan"), float("inf"), 0.0
    there, factors = rows.float().to(device), weights.float().to(device)
    expected = torch.einsum("i,i...->...", weights, rows.nan_to_num(0.0, 0.0))
    found = add_weighed_rows(None, Factors.of(factors), there).cpu().double()
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    nothing = add_weighed_rows(
        torch.ones(3, 7001, device=device), Factors.of(torch.zeros_like(factors)), there[[5] * 96]
    )
    assert bool((nothing == 1).all())
