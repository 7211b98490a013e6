"""The bugs; each function returns a context manager that patches the real code."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from groupwise.clipping import ClippingEngine, Sensitivity, group_pass
from groupwise.clipping.checks import LossesOf
from groupwise.clipping.factors import Factors, keep_finite
from groupwise.clipping.groups import ClippingGroup, LayerCall
from groupwise.privacy import (
    AdaptiveThresholds,
    NoiseSource,
    PoissonSampler,
    ShuffleSampler,
    mechanism,
    thresholds,
)
from groupwise.training import private_step
from groupwise.training.private_step import PrivateStep, Released

Bug = Callable[[], AbstractContextManager[object]]
PUBLIC_SEED = 0


def no_noise() -> AbstractContextManager[object]:
    """Sums and counts are released without noise."""
    real = NoiseSource.add_gaussians_

    def without(self: NoiseSource, tensors: Any, stds: Any, *place: Any, **options: Any) -> None:
        real(self, tensors, [0.0] * len(stds), *place, **options)

    return patch.object(NoiseSource, "add_gaussians_", without)


def noise_without_root_k() -> AbstractContextManager[object]:
    """S = max_k C_k/γ_k instead of (Σ_k C_k²/γ_k²)^½, which for equal thresholds is too small by a factor of √K."""
    real = mechanism.sensitivity
    return patch.object(mechanism, "sensitivity", lambda c, weights: real(c, weights) / math.sqrt(len(c)))


@contextmanager
def noise_on_every_rank() -> Iterator[None]:
    """Each of R replicas adds noise with σ/R from its own key, so the sum has σ/√R."""

    def keep(self: PrivateStep) -> Tensor:
        return torch.zeros(0) if self.engine is None else self.engine.counts

    def release(self: PrivateStep, step: int) -> float | None:
        assert self.engine is not None and self.thresholds is not None
        private_step.release_gradients(
            self.engine.sensitivity(self.plan.adjacency),
            allocation=self.allocation,
            noise_multiplier=self.plan.gradient_noise_multiplier / self.ranks.replicas,
            expected_batch_size=self.plan.expected_batch_size,
            noise=self.noise.child(f"rank {self.ranks.replica}"),
            step=step,
        )
        self.ranks.sum_(self._gradients())
        return None

    with patch.object(PrivateStep, "_sum_over_replicas", keep), patch.object(PrivateStep, "_release", release):
        yield


def one_stream_for_all() -> AbstractContextManager[object]:
    """Two shards or stages draw from the same key and stream, so parameters of the same shape get the same noise."""
    real = NoiseSource.add_gaussians_

    def each(self: NoiseSource, tensors: Any, stds: Any, *place: Any, **options: Any) -> None:
        for tensor, std in zip(tensors, stds, strict=True):
            real(self, [tensor], [std], *place, **options)

    return patch.object(NoiseSource, "add_gaussians_", each)


def one_noise_for_all_steps() -> AbstractContextManager[object]:
    """The noise does not depend on the step."""
    real = NoiseSource._digest
    return patch.object(NoiseSource, "_digest", lambda self, step, stream: real(self, 0, stream))


def masks_from_the_public_seed() -> AbstractContextManager[object]:
    """Dropout masks are drawn from the public `seed`, so anyone can reproduce them, in the order of the batch."""

    @contextmanager
    def public(*place: Any, **settings: Any) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(PUBLIC_SEED)
            yield

    return patch.object(private_step, "secret_randomness", public)


def no_clipping() -> AbstractContextManager[object]:
    """All clip factors are 1."""
    return patch.object(group_pass, "keep_finite", lambda factors, *rest: keep_finite(torch.ones_like(factors), *rest))


@contextmanager
def first_layer_unclipped() -> Iterator[None]:
    """The clip factors of the first group are 1."""
    real = group_pass.clip_factors_of

    def factors(groups: Sequence[ClippingGroup], squares: Sequence[Tensor]) -> list[Factors]:
        found = real(groups, squares)
        for i, group in enumerate(groups):
            if group.index == 0:
                ones = torch.ones_like(found[i].values)
                found[i] = Factors.of(keep_finite(ones, squares[i], ones.dtype))
        return found

    with patch.object(group_pass, "clip_factors_of", factors):
        yield


def tied_use_missed() -> AbstractContextManager[object]:
    """The norm of a weight that is used several times in a forward pass includes only one use."""

    def stack_calls(calls: list[LayerCall]) -> tuple[list[LayerCall], list[LayerCall]]:
        unnoticed: list[Any] = [_Unnoticed(call.rule) for call in calls[1:]]
        later = [replace(call, rule=rule) for call, rule in zip(calls[1:], unnoticed, strict=True)]
        return [], [*calls[:1], *later]

    return patch.object(group_pass, "stack_calls", stack_calls)


class _Unnoticed:  # implements only the methods of a rule that the group calls
    """A rule that adds to the sums, but not to the norms."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def squared_norms(self, saved: Any, g: Tensor, *rest: Any) -> Tensor:
        return torch.zeros(len(g), dtype=torch.float64, device=g.device)


def tied_uses_as_if_separate() -> AbstractContextManager[object]:
    """The squared norm of a tied weight is the sum over its uses, without their inner products."""
    return patch.object(group_pass, "stack_calls", lambda calls: ([], calls))


@contextmanager
def thresholds_before_noise() -> Iterator[None]:
    """Thresholds are updated before the noise, which is then scaled to the new ones instead of those that clipped."""
    real_release, real_update, real_sensitivity = (
        PrivateStep._release,
        AdaptiveThresholds.update,
        ClippingEngine.sensitivity,
    )

    def release(self: PrivateStep, step: int) -> float | None:
        assert self.engine is not None and isinstance(self.thresholds, AdaptiveThresholds)
        real_update(self.thresholds, self.engine.counts, self.engine.examples, self.count_noise, step)
        moved = self.thresholds.clip_thresholds

        def in_force(engine: ClippingEngine, relation: str) -> Sensitivity:
            return replace(real_sensitivity(engine, relation), thresholds=moved)

        with patch.object(ClippingEngine, "sensitivity", in_force):
            return real_release(self, step)

    with (
        patch.object(PrivateStep, "_release", release),
        patch.object(AdaptiveThresholds, "update", lambda self, counts, examples, noise, step: None),
    ):
        yield


def counts_not_centred() -> AbstractContextManager[object]:
    """Raw counts, as printed in Algorithm 1."""
    return patch.object(thresholds, "centred_counts", lambda counts, examples: torch.as_tensor(counts).double().clone())


def counts_of_the_last_microbatch() -> AbstractContextManager[object]:
    """Counts are reset at each microbatch."""
    real = PrivateStep.clip

    def clip(self: PrivateStep, losses_of: LossesOf, rows: Sequence[int], present: Tensor | None = None) -> Tensor:
        if self.engine is not None:
            self.engine.reset()
        return real(self, losses_of, rows, present)

    return patch.object(PrivateStep, "clip", clip)


def drawn_batch_size() -> AbstractContextManager[object]:
    """The noisy sum is divided by the drawn batch size."""
    real, release = PrivateStep._release, private_step.release_gradients

    def divided(self: PrivateStep, step: int) -> float | None:
        drawn = max(self.engine.examples if self.engine else 0, 1)

        def by_drawn(*groups: Any, expected_batch_size: float, **settings: Any) -> Tensor:
            return release(*groups, expected_batch_size=drawn, **settings)

        with patch.object(private_step, "release_gradients", by_drawn):
            return real(self, step)

    return patch.object(PrivateStep, "_release", divided)


def shuffled_batches() -> AbstractContextManager[object]:
    """Batches come from a permutation, but the plan accounts for Poisson sampling."""
    shuffles: dict[PoissonSampler, ShuffleSampler] = {}

    def indices(self: PoissonSampler, step: int) -> np.ndarray:
        if self not in shuffles:
            shuffles[self] = ShuffleSampler(self.dataset_size, round(self.sample_rate * self.dataset_size), self._seed)
        return shuffles[self].indices(step)

    return patch.object(PoissonSampler, "indices", indices)


def empty_batches_skipped() -> AbstractContextManager[object]:
    """A step with an empty batch does nothing."""
    real = PrivateStep.step

    def step(self: PrivateStep) -> Released:
        if len(self.sampler.indices(self.executed)):
            return real(self)
        self.executed += 1
        return Released(0, torch.zeros(1), 0.0, 0, 0.0)

    return patch.object(PrivateStep, "step", step)


def mean_loss() -> AbstractContextManager[object]:
    """Losses are divided by the size of the batch before they are clipped."""
    real = ClippingEngine.backward

    def backward(self: ClippingEngine, losses: Tensor, present: Tensor | None = None) -> None:
        real(self, losses / len(losses), present)

    return patch.object(ClippingEngine, "backward", backward)
