"""Releases one logical batch's gradients: noise, once, then division by the configured B (lines 13-14)."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.privacy.noise import NoiseSource


class Sensitivity(Protocol):
    """How far one example moves the sums in the .grad of groups of parameters, by whoever clipped them.

    It is what `groupwise.clipping.ClippingEngine.sensitivity` says.
    """

    @property
    def relation(self) -> str:
        """Which batches are neighbours: an adjacency that a plan can have."""

    @property
    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """K groups of parameters, each parameter once."""

    @property
    def thresholds(self) -> torch.Tensor:
        """C, (K,): group k's sum moves by at most C_k in ℓ2, jointly over the group."""


def release_gradients(
    sensitivity: Sensitivity,
    *,
    allocation: str,
    noise_multiplier: float,
    expected_batch_size: float,
    noise: NoiseSource,
    step: int,
    groups_elsewhere: int = 0,
) -> torch.Tensor:
    """Turn clipped sums into private means, in place on ``p.grad``: (Σ_i g̃_k^(i) + N(0, std_k²))/B.

    Formal guarantee: let ``p.grad`` hold, over the examples of one Poisson sample, sums that ``sensitivity`` is true
    of. Then all groups together are one release of the Gaussian mechanism with noise multiplier ``noise_multiplier``
    (σ_new of the plan), when one example is added or removed, whatever the ``allocation``. Thresholds come with the
    sums, from the engine that clipped them, so no others can be given. Not covered: calling it twice for a step (once
    per microbatch, say).

    Args:
        sensitivity: ``engine.sensitivity("add_remove")``. A ``grad`` of None (an empty batch) is a sum of 0. Of
            parameters in shards over several processes (FSDP2) each process noises its own shards, so its ``noise``
            must be a source of its own (see :meth:`~groupwise.privacy.noise.NoiseSource.derive`).
        allocation: "global", "equal_budget" or "weighted" (γ_k).
        noise_multiplier: σ_new; 0 adds nothing and guarantees nothing.
        expected_batch_size: B = ρN as configured, never the drawn size.
        noise: the run's source; entries are numbered through the groups.
        step: the logical step, which the noise belongs to.
        groups_elsewhere: how many groups the other devices of a pipeline release for the same sample, each device with
            a noise source of its own (Algorithm 2); the guarantee is then for the groups of all devices together. Only
            with "equal_budget".

    Returns:
        std_k = σ_new·S·γ_k, float64 of shape (K,): the noise on the sums, before the division by B.

    Raises:
        UserError: a sensitivity for another relation than plans account for; a parameter that is in two groups; what
            :func:`~groupwise.privacy.noise_stds` refuses.
    """
    if sensitivity.relation != "add_remove":
        raise UserError(
            f"the sensitivity is for relation {sensitivity.relation!r}; noise multipliers are accounted for "
            "'add_remove': ask the engine for that one."
        )
    groups, thresholds = sensitivity.groups, sensitivity.thresholds
    parameters = [id(parameter) for group in groups for parameter in group]
    if len(set(parameters)) < len(parameters):
        raise UserError("a parameter is twice in the groups (tied weights?); put each into one group, once.")
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    stds = noise_stds(thresholds, sizes, noise_multiplier, allocation, groups_elsewhere=groups_elsewhere)
    sums: list[torch.Tensor] = []
    for group in groups:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sums.append(_local(parameter.grad))
    each = [std for group, std in zip(groups, stds.tolist(), strict=True) for _ in group]
    noise.add_gaussians_(sums, each, step, divisor=expected_batch_size)
    return stds


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a distributed tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


ALLOCATIONS = ("global", "equal_budget", "weighted")


def noise_weights(
    thresholds: torch.Tensor | Sequence[float], sizes: torch.Tensor | Sequence[int], allocation: str
) -> torch.Tensor:
    """Return γ, float64 of shape (K,), for thresholds C (K,) and group sizes d (K,), numbers of parameters.

    "global": γ_k = 1; "equal_budget": γ_k = C_k; "weighted": γ_k = C_k/√d_k (§3.3 and appendix on noise allocation).
    Raises :class:`UserError` for an unknown allocation, a threshold that is not finite and positive, or an empty group.
    """
    c = positive(thresholds, "thresholds")
    d = positive(sizes, "sizes")
    if c.shape != d.shape:
        raise UserError(f"thresholds has {len(c)} entries and sizes {len(d)}; give one of each for every group.")
    if allocation == "global":
        return torch.ones_like(c)
    if allocation == "equal_budget":
        return c
    if allocation == "weighted":
        return c / d.sqrt()
    raise UserError(f"allocation is {allocation!r}; choose one of {', '.join(ALLOCATIONS)}.")


def sensitivity(thresholds: torch.Tensor | Sequence[float], weights: torch.Tensor | Sequence[float]) -> float:
    """Return S = (Σ_k C_k²/γ_k²)^½ (line 13 of Algorithm 1).

    Formal guarantee: if one example moves group k's sum by at most C_k in ℓ2, it moves (g_1/γ_1, …, g_K/γ_K) by at
    most S. ``thresholds`` must be those that clipped *this* batch.
    """
    shares = torch.as_tensor(thresholds, dtype=torch.float64) / torch.as_tensor(weights, dtype=torch.float64)
    return float(shares.square().sum().sqrt())


def noise_stds(
    thresholds: torch.Tensor | Sequence[float],
    sizes: torch.Tensor | Sequence[int],
    noise_multiplier: float,
    allocation: str,
    *,
    groups_elsewhere: int = 0,
) -> torch.Tensor:
    """Return std_k = σ_new·S·γ_k, float64 of shape (K,), the noise on each coordinate of group k's *sum*.

    Formal guarantee: Σ_k (C_k/std_k)² = 1/σ_new² for every allocation, so releasing all K noisy sums costs exactly one
    Gaussian release with noise multiplier σ_new = ``noise_multiplier``. σ_new = 0 gives zeros (and no guarantee).

    With ``groups_elsewhere`` = K' more groups on other devices the sum runs over all K + K' groups, provided that every
    device counts all the others' groups: std_k = σ_new·√(K + K')·C_k (Algorithm 2). It takes "equal_budget", whose S
    is a root of a number of groups; the others' S needs the thresholds of all devices. Raises :class:`UserError`.
    """
    if not 0.0 <= noise_multiplier < float("inf"):
        raise UserError(f"noise_multiplier is {noise_multiplier}; give a finite number of at least 0.")
    if groups_elsewhere < 0:
        raise UserError(f"groups_elsewhere is {groups_elsewhere}; give the number of groups on other devices.")
    weights = noise_weights(thresholds, sizes, allocation)
    if groups_elsewhere and allocation != "equal_budget":
        raise UserError(
            f"allocation {allocation!r} needs the thresholds of the other devices: with groups on several devices set "
            "noise.allocation=equal_budget."
        )
    return noise_multiplier * math.hypot(sensitivity(thresholds, weights), math.sqrt(groups_elsewhere)) * weights


def positive(values: torch.Tensor | Sequence[float], name: str) -> torch.Tensor:
    """Return the values as float64 on the CPU, (K,); raises :class:`UserError` unless all are finite and above 0."""
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if tensor.ndim != 1 or not len(tensor) or not all(0.0 < value < math.inf for value in tensor.tolist()):
        raise UserError(f"{name} is {tensor.tolist()}; give a flat list of finite numbers above 0, one for each group.")
    return tensor
