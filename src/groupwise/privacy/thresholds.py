"""Clipping thresholds C_k that are fixed, or follow a private quantile of the norms (Algorithm 1)."""

import math
from collections.abc import Sequence

import torch

from groupwise.errors import UserError
from groupwise.privacy.mechanism import positive
from groupwise.privacy.noise import COUNT_STREAM, NoiseSource


def centred_counts(counts: torch.Tensor, examples: int) -> torch.Tensor:
    """Return Σ_i (b_k^(i) - ½), float64 of shape (K,), from the counts b̄_k (K,) of ``examples`` examples.

    Formal guarantee: adding or removing one example moves the vector by exactly ½√K in ℓ2. The raw counts of Algorithm
    1 would move by up to √K. The paper's proof (appendix "Proofs") uses the centred bits too.
    Raises :class:`UserError` unless the counts are whole numbers with 0 ≤ b̄_k ≤ ``examples``.
    """
    raw = torch.as_tensor(counts).detach().to(device="cpu", dtype=torch.float64)
    if raw.ndim != 1 or not bool(((raw >= 0) & (raw <= examples) & (raw == raw.round())).all()):
        raise UserError(
            f"the clip counts are {raw.tolist()} for {examples} examples; for each group, give the number of examples "
            "whose norm is at most its threshold."
        )
    return raw - 0.5 * examples


class FixedThresholds:
    """Thresholds C_k that do not change. No counts are released, which costs no budget (r = 0)."""

    def __init__(self, values: torch.Tensor | Sequence[float]) -> None:
        self._raw = positive(values, "thresholds").clone()

    @property
    def clip_thresholds(self) -> torch.Tensor:
        """C, float64 of shape (K,): the thresholds for clipping and noise in the current step."""
        return self._raw.clone()

    @property
    def count_thresholds(self) -> torch.Tensor:
        """The thresholds, float64 of shape (K,), at which norms are counted."""
        return self._raw.clone()

    def update(self, counts: torch.Tensor, examples: int, noise: NoiseSource, step: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return ``{"thresholds": C}``, before any rescaling."""
        return {"thresholds": self._raw.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore C from :meth:`state_dict`."""
        self._raw = positive(state["thresholds"], "thresholds").clone()


class AdaptiveThresholds(FixedThresholds):
    """Thresholds C_k that follow the q-quantile of group k's example norms (Andrew et al. 2021; §3.3).

    Formal guarantee: each :meth:`update` releases the centred counts, whose ℓ2 sensitivity is ½√K, with N(0, σ_b²)
    noise. That is a Gaussian release with noise multiplier 2σ_b/√K. Together with gradients that have noise at σ_new of
    the same :class:`~groupwise.privacy.plan.PrivacyPlan`, it costs one Gaussian release at σ. Covered: the thresholds
    of all steps. Not covered: the raw counts and the drawn batch size, which must not be published.

    Args:
        initial: C_k before the first step, (K,), above 0. They must not depend on the data.
        target_quantile: q in [0, 1].
        learning_rate: η of line 16 (0.3 in the paper).
        count_noise_multiplier: σ_b of the plan; 0 means noiseless counts and no guarantee.
        expected_batch_size: the configured B, never the drawn size.
        minimum, maximum: public bounds on the raw C_k.
        rescale_to: C, to clip at C·C_k/√(ΣC_j²) (the paper's CIFAR-10 runs), or None. The counts always compare norms
            with the raw C_k.
    """

    def __init__(
        self,
        initial: torch.Tensor | Sequence[float],
        target_quantile: float,
        learning_rate: float,
        count_noise_multiplier: float,
        expected_batch_size: float,
        minimum: float = 1e-8,
        maximum: float = 1e8,
        rescale_to: float | None = None,
    ) -> None:
        if not 0.0 <= count_noise_multiplier < math.inf:
            raise UserError(f"count_noise_multiplier is {count_noise_multiplier}; give a finite number of at least 0.")
        self.target_quantile = target_quantile
        self.learning_rate = learning_rate
        self.count_noise_multiplier = count_noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.minimum, self.maximum = minimum, maximum
        self.rescale_to = rescale_to
        super().__init__(initial)
        self._raw.clamp_(minimum, maximum)

    @property
    def clip_thresholds(self) -> torch.Tensor:
        """C, float64 of shape (K,): the thresholds for clipping *and* noise in this step, rescaled if configured."""
        if self.rescale_to is None:
            return self._raw.clone()
        return self.rescale_to * self._raw / torch.linalg.vector_norm(self._raw)

    def update(self, counts: torch.Tensor, examples: int, noise: NoiseSource, step: int) -> None:
        """Set C_k ← C_k·exp(-η(b̃_k - q)) with b̃_k = (Σ_i(b_k^(i) - ½) + N(0, σ_b²))/B + ½, clamped (line 16).

        Call this after adding noise to the gradients of ``step``, since that noise needs the old thresholds.
        ``counts`` (K,) are summed over all microbatches and ranks of the logical batch, and ``examples`` is its drawn
        size. Raises :class:`UserError` for impossible counts.
        """
        released = centred_counts(counts, examples)
        if self.count_noise_multiplier > 0.0:
            noise.add_gaussian_(released, self.count_noise_multiplier, step, COUNT_STREAM)
        below = released / self.expected_batch_size + 0.5
        moved = self._raw * torch.exp(-self.learning_rate * (below - self.target_quantile))
        self._raw = moved.clamp(self.minimum, self.maximum)
