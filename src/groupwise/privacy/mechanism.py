"""Adds noise to the gradient sums of a logical batch and divides by the configured B (Algorithm 1, lines 13-14)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from groupwise.errors import UserError
from groupwise.privacy.noise import NoiseSource


def release_gradients(
    sensitivity: Any,
    *,
    allocation: str,
    noise_multiplier: float,
    expected_batch_size: float,
    noise: NoiseSource,
    step: int,
    groups_elsewhere: int = 0,
) -> torch.Tensor:
    """Turn clipped sums into private means, in place on ``p.grad``: (Σ_i g̃_k^(i) + N(0, std_k²))/B.

    Formal guarantee: let ``p.grad`` hold sums over the examples of one Poisson sample, and let ``sensitivity`` be true
    of these sums. Then all groups together are one release of the Gaussian mechanism with noise multiplier
    ``noise_multiplier`` (σ_new of the plan), when one example is added or removed. This holds for every ``allocation``.
    The thresholds come from the engine that clipped the sums. Not covered: calling this more than once for a step, such
    as once per microbatch.

    Args:
        sensitivity: ``engine.sensitivity("add_remove")``: the ``relation`` of neighbouring batches, the ``groups`` of
            parameters, and the ``thresholds`` (K,), by which group k's sum moves at most. A ``grad`` of None (an empty
            batch) is a sum of 0. If parameters are sharded over processes (FSDP2), each process adds noise to its own
            shards. It then needs its own ``noise`` (see :meth:`~groupwise.privacy.noise.NoiseSource.child`).
        allocation: "global", "equal_budget" or "weighted"; see :func:`noise_weights`.
        noise_multiplier: σ_new; 0 adds no noise and gives no guarantee.
        expected_batch_size: B = ρN as configured, never the drawn size.
        noise: the run's source. Entries are numbered through all groups.
        groups_elsewhere: K', on a pipeline's other devices, each with its own noise source; see :func:`noise_stds`.

    Returns:
        std_k = σ_new·S·γ_k, float64 of shape (K,): the noise on the sums, before the division by B.

    Raises :class:`UserError` if the sensitivity is for another relation than that of plans, and as :func:`noise_stds`.
    """
    if sensitivity.relation != "add_remove":
        raise UserError(
            f"the sensitivity is for relation {sensitivity.relation!r}, but noise multipliers are accounted for "
            "'add_remove': ask the engine for that one."
        )
    groups, thresholds = sensitivity.groups, sensitivity.thresholds
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    stds = noise_stds(thresholds, sizes, noise_multiplier, allocation, groups_elsewhere=groups_elsewhere)
    sums, each = list[torch.Tensor](), list[float]()
    for group, std in zip(groups, stds.tolist(), strict=True):
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad: Any = parameter.grad
            sums.append(grad.to_local() if hasattr(grad, "to_local") else grad)  # this process's shard
            each.append(std)
    noise.add_gaussians_(sums, each, step, divisor=expected_batch_size)
    return stds


ALLOCATIONS = ("global", "equal_budget", "weighted")


def noise_weights(
    thresholds: torch.Tensor | Sequence[float], sizes: torch.Tensor | Sequence[int], allocation: str
) -> torch.Tensor:
    """Return γ, float64 of shape (K,), for thresholds C (K,) and group sizes d (K,) in numbers of parameters.

    "global": γ_k = 1; "equal_budget": γ_k = C_k; "weighted": γ_k = C_k/√d_k (§3.3 and appendix on noise allocation).
    Raises :class:`UserError` for an unknown allocation, a threshold that is not finite and positive, or an empty group.
    """
    c = positive(thresholds, "thresholds")
    d = positive(sizes, "sizes")
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

    Formal guarantee: Σ_k (C_k/std_k)² = 1/σ_new² for every allocation. So releasing all K noisy sums costs exactly one
    Gaussian release with noise multiplier σ_new = ``noise_multiplier``. σ_new = 0 gives zeros and no guarantee.

    ``groups_elsewhere`` = K' is the number of groups on other devices, and the guarantee then covers all K + K' groups:
    std_k = σ_new·√(K + K')·C_k (Algorithm 2). This needs "equal_budget", for which S = √(K + K'). For the other
    allocations S depends on the thresholds of all devices.

    Raises :class:`UserError` for σ_new outside [0, ∞), for another allocation with ``groups_elsewhere``, and as
    :func:`noise_weights` does.
    """
    if not 0.0 <= noise_multiplier < float("inf"):
        raise UserError(f"noise_multiplier is {noise_multiplier}; give a finite number of at least 0.")
    weights = noise_weights(thresholds, sizes, allocation)
    if groups_elsewhere and allocation != "equal_budget":
        raise UserError(
            f"allocation {allocation!r} needs the thresholds of the other devices; set noise.allocation=equal_budget "
            "for groups on several devices."
        )
    return noise_multiplier * math.hypot(sensitivity(thresholds, weights), math.sqrt(groups_elsewhere)) * weights


def positive(values: torch.Tensor | Sequence[float], name: str) -> torch.Tensor:
    """Return the values as float64 on the CPU, (K,); raises :class:`UserError` unless all are finite and above 0."""
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if tensor.ndim != 1 or not len(tensor) or not all(0.0 < value < math.inf for value in tensor.tolist()):
        raise UserError(f"{name} is {tensor.tolist()}; give a flat list of finite numbers above 0, one for each group.")
    return tensor
