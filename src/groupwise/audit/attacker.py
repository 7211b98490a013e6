"""The attacker: observes the steps of the real trainer, and computes the evidence for each canary."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from groupwise.audit.canaries import by_canary, own_gradients
from groupwise.audit.options import Setting
from groupwise.clipping import automatic_factors, clip_factors
from groupwise.clipping.factors import ClipRule
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.privacy import AdaptiveThresholds, PrivacyPlan, noise_stds
from groupwise.training.step import Trainer

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A statistic for each canary: N(0, a) if it is not in the batch and N(a, a) if it is.

    Args:
        found: the statistics, (m,). power: a, (m,).
    """

    found: Floats
    power: Floats

    def __add__(self, other: "Evidence") -> "Evidence":
        """The sum of two independent pieces of evidence."""
        return Evidence(self.found + other.found, self.power + other.power)


def in_gradients(released: list[Floats], own: list[Floats], stds: list[float]) -> Evidence:
    """Return the evidence in noisy clipped sums: Σ_k ⟨released, own⟩/std_k², with one list entry per parameter.

    Args:
        released: the noisy sums, (m, d) by canary.
        own: each canary's clipped gradient, (m, d).
        stds: standard deviations of the noise.
    """
    found = sum((u * v).sum(1) / std**2 for u, v, std in zip(released, own, stds, strict=True))
    power = sum((v * v).sum(1) / std**2 for v, std in zip(own, stds, strict=True))
    return Evidence(np.asarray(found, dtype=np.float64), np.asarray(power, dtype=np.float64))


def in_counts(released: Floats, bits: Floats, std: float, chance: float) -> Evidence:
    """Return the evidence in noisy centred counts. The other canaries are treated as noise of known covariance.

    Args:
        released: Σ_i (b_k - ½) + noise, (K,).
        bits: each canary's b_k - ½, (m, K).
        std: σ_b.
        chance: the probability that a canary is in the batch.
    """
    spread = chance * (1.0 - chance)
    covariance = std**2 * np.eye(bits.shape[1]) + spread * bits.T @ bits
    weights = np.linalg.solve(covariance, bits.T).T  # (m, K)
    with_itself = (weights * bits).sum(1)
    others = np.maximum(1.0 - spread * with_itself, 1e-12)  # Sherman-Morrison: remove the canary's own share
    centre = released - chance * bits.sum(0)
    return Evidence((weights @ centre + chance * with_itself) / others, with_itself / others)


def log_ratio(evidence: Evidence, sample_rate: float) -> Floats:
    """Return the log-likelihood ratio of the canary being in the data, (m,), for sampling at ``sample_rate``."""
    drawn = evidence.found - 0.5 * evidence.power
    if sample_rate >= 1.0:
        return drawn
    return np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + drawn)


class Attacker:
    """Runs steps, and computes the evidence for each canary from their releases.

    It knows all canaries, the configuration and the code, and therefore every noise scale. It does not know the noise,
    or which canaries are in the data.

    Args:
        trainer: a trainer with plain SGD, so that weights reveal the released gradients.
        plain: a copy of its model without an engine.
        losses_of: a function of this model and indices of canaries (b,) that returns their losses (b,).
    """

    def __init__(
        self, trainer: Trainer, plain: nn.Module, losses_of: Callable[[nn.Module, Tensor], Tensor], setting: Setting
    ) -> None:
        assert trainer.private.engine is not None and trainer.private.thresholds is not None
        self._trainer, self._plain, self._losses_of, self._m = trainer, plain, losses_of, setting.canaries
        self._groups = trainer.private.engine.groups
        self._thresholds = trainer.private.thresholds
        self._clip = setting.config.clip
        names = {id(p): name for name, p in trainer.task.model.named_parameters()}
        self._names = [[names[id(p)] for p in group.parameters] for group in self._groups]
        self._rate = setting.config.optim.learning_rate

    def step(self, step: int) -> Evidence:
        """Run step ``step`` of the trainer, and return its evidence for every canary."""
        own, bits = self._expected()
        before = self._weights()
        raw = self._thresholds.state_dict()["thresholds"]
        stds = stds_of(self._trainer)
        self._trainer.step(step)
        batch = self._trainer.private.plan.expected_batch_size
        released = {name: (before[name] - after) * (batch / self._rate) for name, after in self._weights().items()}
        flat = [(name, std) for names, std in zip(self._names, stds, strict=True) for name in names]
        evidence = in_gradients(
            [by_canary(released[name], self._m).numpy() for name, _ in flat],
            [own[name].numpy() for name, _ in flat],
            [std for _, std in flat],
        )
        policy = self._thresholds
        if isinstance(policy, AdaptiveThresholds) and policy.learning_rate > 0:  # else thresholds do not reveal counts
            moved = torch.log(policy.state_dict()["thresholds"] / raw)
            below = policy.target_quantile - moved / policy.learning_rate
            counts = np.asarray((below - 0.5) * policy.expected_batch_size, dtype=np.float64)
            chance = 0.5 * self._trainer.private.plan.sample_rate
            evidence += in_counts(counts, bits, policy.count_noise_multiplier, chance)
        return evidence

    def _expected(self) -> tuple[dict[str, Tensor], Floats]:
        """Return each canary's contribution: clipped gradients (m, d_p) by parameter, float64, and b_k - ½, (m, K)."""
        self._plain.load_state_dict(self._trainer.task.model.state_dict())
        own = own_gradients(self._losses_of, self._plain, self._m)
        own = {name: gradient.double() for name, gradient in own.items()}
        rule = _rule_of(self._clip)
        bits = np.zeros((self._m, len(self._groups)))
        both = zip(self._thresholds.clip_thresholds, self._thresholds.count_thresholds, self._names, strict=True)
        for k, (threshold, counted, names) in enumerate(both):
            norms = torch.stack([own[name].square().sum(1) for name in names]).sum(0).sqrt()
            factors = rule(norms, threshold)
            bits[:, k] = np.where((norms <= counted).numpy(), 0.5, -0.5)
            for name in names:
                own[name] = own[name] * factors.unsqueeze(1)
        return own, bits

    def _weights(self) -> dict[str, Tensor]:
        named = self._trainer.task.model.named_parameters()
        return {name: p.detach().double().clone() for name, p in named if p.requires_grad}


def stds_of(trainer: Trainer) -> list[float]:
    """Return the standard deviation of the noise on each group's sum in the next step, from the plan alone."""
    assert trainer.private.engine is not None and trainer.private.thresholds is not None
    plan, groups = trainer.private.plan, trainer.private.engine.groups
    return noise_stds(
        trainer.private.thresholds.clip_thresholds,
        trainer.private.group_sizes,
        plan.gradient_noise_multiplier,
        trainer.private.allocation,
        groups_elsewhere=plan.num_groups - len(groups),
    ).tolist()


def power_if_clipped(plan: PrivacyPlan, codes: bool) -> float:
    """Return `Evidence.power` in one step, for a canary that every group clips, or for one of `canaries.Codes`."""
    gradients = 1.0 / plan.gradient_noise_multiplier**2
    if not codes:
        return gradients
    counts = 0.25 * plan.num_groups / plan.count_noise_multiplier**2 if plan.count_noise_multiplier else 0.0
    return 0.625 * gradients + counts


def _rule_of(clip: ClipConfig) -> ClipRule:
    """Return the clip rule of `clip.rule`, chosen independently of the run, to find errors in the run's choice."""
    if clip.rule == "automatic":
        return automatic_factors(clip.gamma)
    if clip.rule == "min":
        return clip_factors
    raise UserError(f"the audit does not support clip.rule={clip.rule}: add it to groupwise/audit/attacker.py.")
