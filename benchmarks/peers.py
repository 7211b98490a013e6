"""Runs Opacus as its documentation does (opacus.ai: `GradSampleModule`, "Fast Gradient Clipping and Ghost Clipping").

- hooks: `GradSampleModule`, `DPOptimizer`; functorch: the same with `force_functorch=True`; both materialise
  per-example gradients and clip them together (flat).
- ghost: `GradSampleModuleFastGradientClipping(use_ghost_clipping=True)`, whose loss wrapper runs backward twice.
- per layer: hooks with `DPPerLayerOptimizer`; its "layer" is a single parameter, with threshold C/√P each.

Options that save work are set: `loss_reduction="sum"` (no rescaling), `zero_grad(set_to_none=True)`, no secure mode.
Work of the optimiser between clipping and noise (a copy of the sums, for ghost) counts as noise. With images in
channels_last its rule for `nn.Conv2d` reads memory in the wrong order and clips to wrong sums, without an error. So
`driver` uses that format only if the sums agree with those of contiguous images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workloads import Workload

PREFIX = "opacus_"


def is_peer(method: str) -> bool:
    """Whether a method belongs to Opacus."""
    return method.startswith(PREFIX)


class Materialized:
    """Per-example gradients in `p.grad_sample`, clipped and summed by the optimiser."""

    def __init__(
        self,
        workload: Workload,
        threshold: float,
        noise_multiplier: float,
        *,
        force_functorch: bool = False,
        each_parameter: bool = False,
    ) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

        self._workload = workload
        self._module = GradSampleModule(workload.model, loss_reduction="sum", force_functorch=force_functorch)
        count = len(workload.trainable)
        if each_parameter:
            bounds: Any = [threshold / math.sqrt(count)] * count
            self._optimizer = _optimizer(DPPerLayerOptimizer, workload, bounds, noise_multiplier)
        else:
            self._optimizer = _optimizer(DPOptimizer, workload, threshold, noise_multiplier)

    def step(self) -> None:
        """Compute per-example gradients, then clipped sums."""
        self.clear()
        self._workload.loss().sum().backward()
        self._optimizer.clip_and_accumulate()
        for parameter in self._workload.trainable:
            parameter.grad = parameter.summed_grad  # type: ignore[attr-defined]

    def noise(self) -> None:
        """Add noise by Opacus."""
        self._optimizer.add_noise()
        self._optimizer.scale_grad()

    def clear(self) -> None:
        """Clear sums and per-example gradients."""
        self._optimizer.zero_grad(set_to_none=True)


class Ghost:
    """Computes norms in a first backward pass, clipped sums in a second."""

    def __init__(self, workload: Workload, threshold: float, noise_multiplier: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        self._workload = workload
        self._module = GradSampleModuleFastGradientClipping(
            workload.model, loss_reduction="sum", max_grad_norm=threshold, use_ghost_clipping=True
        )
        self._optimizer = _optimizer(DPOptimizerFastGradientClipping, workload, threshold, noise_multiplier)
        self._wrap: Callable[..., Any] = DPTensorFastGradientClipping

    def step(self) -> None:
        """Run both backward passes."""
        self.clear()
        self._wrap(self._module, self._optimizer, self._workload.loss(), loss_reduction="sum").backward()

    def noise(self) -> None:
        """Copy the sums and add noise by Opacus."""
        self._optimizer.accumulate()
        self._optimizer.add_noise()
        self._optimizer.scale_grad()

    def clear(self) -> None:
        """Clear the sums."""
        self._optimizer.zero_grad(set_to_none=True)


def _optimizer(kind: Callable[..., Any], workload: Workload, threshold: Any, noise_multiplier: float) -> Any:
    return kind(
        torch.optim.SGD(workload.trainable, lr=0.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=threshold,
        expected_batch_size=workload.batch,
        loss_reduction="sum",
    )
