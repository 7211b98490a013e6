"""The release of one logical batch's gradients: noise, once, then division by the configured B (lines 13-14)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.privacy.allocation import noise_stds
from groupwise.privacy.noise import NoiseSource


@runtime_checkable
class Sensitivity(Protocol):
    """How far one example moves the sums in the .grad of groups of parameters, by whoever clipped them.

    It is what `groupwise.clipping.ClippingEngine.sensitivity` says.
    """

    @property
    def relation(self) -> str:
        """Which batches are neighbours: an adjacency that a plan can have."""

    @property
    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """K groups of parameters that share no memory."""

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
        noise: the run's source; parameter j (counted through the groups) uses stream j.
        step: the logical step, which the noise belongs to.
        groups_elsewhere: how many groups the other devices of a pipeline release for the same sample, each device with
            a noise source of its own (Algorithm 2); the guarantee is then for the groups of all devices together. Only
            with "equal_budget".

    Returns:
        std_k = σ_new·S·γ_k, float64 of shape (K,): the noise on the sums, before the division by B.

    Raises:
        UserError: anything else than a sensitivity, or one for another relation than plans account for; B that is not
            finite and positive; memory that is in two groups; what :func:`~groupwise.privacy.noise_stds` refuses.
    """
    if not isinstance(sensitivity, Sensitivity):
        raise UserError(
            f"release_gradients got a {type(sensitivity).__name__}; give engine.sensitivity('add_remove'), which says "
            "which thresholds clipped which parameters."
        )
    if sensitivity.relation != "add_remove":
        raise UserError(
            f"the sensitivity is for relation {sensitivity.relation!r}; noise multipliers are accounted for "
            "'add_remove': ask the engine for that one."
        )
    if not 0.0 < expected_batch_size < math.inf:
        raise UserError(f"expected_batch_size is {expected_batch_size}; give the configured B = ρN, above 0.")
    groups = sensitivity.groups
    _check_partition(groups)
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    thresholds = sensitivity.thresholds
    stds = noise_stds(thresholds, sizes, noise_multiplier, allocation, groups_elsewhere=groups_elsewhere)
    stream = 0
    for group, std in zip(groups, stds.tolist(), strict=True):
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            noise.add_gaussian_(_local(parameter.grad), std, step, stream).div_(expected_batch_size)
            stream += 1
    return stds


def _check_partition(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Refuse memory that appears twice: two thresholds would bound it, and it would be noised twice."""
    parameters = [local for group in groups for parameter in group if (local := _local(parameter)).numel()]
    taken = sorted((_extent(parameter), tuple(parameter.shape)) for parameter in parameters)
    for ((storage, _, end), _), ((other, start, _), shape) in pairwise(taken):
        if storage == other and start < end:
            raise UserError(
                f"a parameter of shape {shape} shares its memory with another in the groups (tied weights?); "
                "put each storage into one group, once."
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a distributed tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _extent(parameter: torch.Tensor) -> tuple[int, int, int]:
    """The storage, and the first byte and the one past the last that the parameter's entries take in it."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    start = int(parameter.storage_offset()) * parameter.element_size()
    return parameter.untyped_storage().data_ptr(), start, start + int(last + 1) * parameter.element_size()
