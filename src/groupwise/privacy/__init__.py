"""Plans, accounting, sampling, noise and private quantiles for group-wise clipping; needs no configuration library."""

from groupwise.privacy.allocation import noise_stds, noise_weights, sensitivity
from groupwise.privacy.mechanism import release_gradients
from groupwise.privacy.noise import COUNT_STREAM, NoiseSource
from groupwise.privacy.plan import PrivacyPlan, make_plan
from groupwise.privacy.quantiles import AdaptiveThresholds, FixedThresholds
from groupwise.privacy.randomness import secret_randomness
from groupwise.privacy.report import EpsilonReport
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler

__all__ = [
    "COUNT_STREAM",
    "AdaptiveThresholds",
    "EpsilonReport",
    "FixedThresholds",
    "NoiseSource",
    "PoissonSampler",
    "PrivacyPlan",
    "ShuffleSampler",
    "make_plan",
    "noise_stds",
    "noise_weights",
    "release_gradients",
    "secret_randomness",
    "sensitivity",
]
