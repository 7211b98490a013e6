"""Privacy plans, accountants, samplers, noise and thresholds for group-wise clipping. Does not need Hydra."""

from groupwise.privacy.mechanism import noise_stds, noise_weights, release_gradients, sensitivity
from groupwise.privacy.noise import COUNT_STREAM, NoiseSource
from groupwise.privacy.plan import EpsilonReport, PrivacyPlan, composed_epsilon, make_plan
from groupwise.privacy.randomness import secret_randomness
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler
from groupwise.privacy.thresholds import AdaptiveThresholds, FixedThresholds

__all__ = [
    "COUNT_STREAM",
    "AdaptiveThresholds",
    "EpsilonReport",
    "FixedThresholds",
    "NoiseSource",
    "PoissonSampler",
    "PrivacyPlan",
    "ShuffleSampler",
    "composed_epsilon",
    "make_plan",
    "noise_stds",
    "noise_weights",
    "release_gradients",
    "secret_randomness",
    "sensitivity",
]
