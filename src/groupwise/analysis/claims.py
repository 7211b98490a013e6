"""The paper's claims as differences between cells."""

from dataclasses import dataclass

from groupwise.analysis.results import settings_of
from groupwise.analysis.statistics import Contrast

MARGIN = 1.0
"""Points (all metrics are in percent) within which two ways of training count as alike."""
LESS, MORE, ALIKE, NO_WORSE = "less", "more", "alike", "no worse"
KINDS = {
    LESS: "the difference is below zero",
    MORE: "the difference is above zero",
    ALIKE: f"the difference is within ±{MARGIN:g} point",
    NO_WORSE: f"the difference is above −{MARGIN:g} point",
}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and the difference that shows it."""

    says: str
    on: str
    contrast: Contrast
    kind: str

    @property
    def ours(self) -> bool:
        """Whether its runs use another network than the paper's."""
        return self.contrast.sweep in OURS


SEARCH = "search_"
"""Prefix of the sweeps that choose settings; their rows are no evidence for claims."""
OURS = ("scatter_cnn", "lite0_cifar", "nonprivate_sst2", "cifar_long")
"""Sweeps on a model that is not the paper's, at whatever scale."""
CIFAR, SST2 = "task=cifar", "task=sst2 model=roberta_base"
LARGE, NOISELESS = "task=sst2 model=roberta_large", "task=cifar privacy=noiseless"
SCATTERING, FEATURES = "CIFAR-10, scattering network", "CIFAR-10, head on features of ImageNet"
WITHOUT_NOISE = "CIFAR-10 without noise"
LOSES = "Fixed per-layer clipping loses to flat clipping"
RECOVER = "Adaptive thresholds recover what fixed ones lose per layer"
ON_PAR = "Adaptive per-layer clipping is on par with flat clipping"
SHARES = "How the noise is shared among layers hardly matters"
SMALL = "A small share r of the budget suffices for the quantiles"
HELPS_LESS = "Adaptivity helps flat clipping less than per-layer clipping"
ADAPTIVE_ON_PAR = "Adaptive per-layer clipping is on par with adaptive flat clipping"
BOTH, CROSSED = "clip=adaptive_layer clip=flat", "clip=fixed_layer clip=adaptive_flat"
BLEU, ROUGE = "test/bleu", "test/rougeL"


def _claim(
    says: str, on: str, sweep: str, plus: str, minus: str, kind: str, where: str = "", metric: str = "valid/accuracy"
) -> Claim:
    """A claim of settings in words, "key=value"; of several in `plus` or `minus` each is a term."""
    added, subtracted = (tuple(settings_of(word) for word in side.split()) for side in (plus, minus))
    return Claim(says, on, Contrast(sweep, added, subtracted, settings_of(where), metric), kind)


FIXED, ADAPTIVE, FLAT = "clip=fixed_layer", "clip=adaptive_layer", "clip=flat"
TEXTS, NOISE, SHARE = "table2text", "noise_allocation", "quantile_budget"
GLOBAL, TENTH = "noise=global", "clip.quantile_budget=0.1"
CLAIMS = (
    _claim(LOSES, "CIFAR-10", "fixed_per_layer", FIXED, FLAT, LESS, CIFAR),
    _claim(LOSES, "SST-2", "fixed_per_layer", FIXED, FLAT, LESS, SST2),
    _claim(LOSES, WITHOUT_NOISE, "adaptive_vs_fixed", FIXED, FLAT, LESS, NOISELESS),
    _claim(LOSES, SCATTERING, "scatter_cnn", FIXED, FLAT, LESS, CIFAR),
    _claim(LOSES, FEATURES, "lite0_cifar", FIXED, FLAT, LESS, CIFAR),
    _claim(RECOVER, "CIFAR-10", "adaptivity", ADAPTIVE, FIXED, MORE, CIFAR),
    _claim(RECOVER, "SST-2", "adaptivity", ADAPTIVE, FIXED, MORE, SST2),
    _claim(RECOVER, WITHOUT_NOISE, "adaptive_vs_fixed", ADAPTIVE, FIXED, MORE, NOISELESS),
    _claim(RECOVER, SCATTERING, "scatter_cnn", ADAPTIVE, FIXED, MORE, CIFAR),
    _claim(RECOVER, FEATURES, "lite0_cifar", ADAPTIVE, FIXED, MORE, CIFAR),
    _claim(ON_PAR, "CIFAR-10", "cifar", ADAPTIVE, FLAT, ALIKE, CIFAR),
    _claim(ON_PAR, WITHOUT_NOISE, "adaptive_vs_fixed", ADAPTIVE, FLAT, ALIKE, NOISELESS),
    _claim(ON_PAR, SCATTERING, "scatter_cnn", ADAPTIVE, FLAT, ALIKE, CIFAR),
    _claim(ON_PAR, FEATURES, "lite0_cifar", ADAPTIVE, FLAT, ALIKE, CIFAR),
    _claim(ON_PAR, "SST-2, RoBERTa-base", "adaptivity", ADAPTIVE, FLAT, ALIKE, SST2),
    _claim(ON_PAR, "SST-2, RoBERTa-base, attention only", "sst2_epochs", ADAPTIVE, FLAT, ALIKE, SST2),
    _claim(ON_PAR, "SST-2, RoBERTa-large, attention only", "sst2_epochs", ADAPTIVE, FLAT, ALIKE, LARGE),
    _claim(LOSES, "E2E and DART, BLEU", TEXTS, FIXED, FLAT, LESS, metric=BLEU),
    _claim(LOSES, "E2E and DART, ROUGE-L", TEXTS, FIXED, FLAT, LESS, metric=ROUGE),
    _claim(RECOVER, "E2E and DART, BLEU", TEXTS, ADAPTIVE, FIXED, MORE, metric=BLEU),
    _claim(RECOVER, "E2E and DART, ROUGE-L", TEXTS, ADAPTIVE, FIXED, MORE, metric=ROUGE),
    _claim(ON_PAR, "E2E and DART, BLEU", TEXTS, ADAPTIVE, FLAT, ALIKE, metric=BLEU),
    _claim(ON_PAR, "E2E and DART, ROUGE-L", TEXTS, ADAPTIVE, FLAT, ALIKE, metric=ROUGE),
    _claim(ON_PAR, "E2E, run for the figures of time, BLEU", "runtime_metrics", ADAPTIVE, FLAT, ALIKE, metric=BLEU),
    _claim(ON_PAR, "E2E, run for the figures of time, ROUGE-L", "runtime_metrics", ADAPTIVE, FLAT, ALIKE, metric=ROUGE),
    _claim(SHARES, "SST-2, equal budget against global", NOISE, "noise=equal_budget", GLOBAL, ALIKE, SST2),
    _claim(SHARES, "SST-2, weighted against global", NOISE, "noise=weighted", GLOBAL, ALIKE, SST2),
    _claim(SMALL, "SST-2, r = 0.01 % against 10 %", SHARE, "clip.quantile_budget=0.0001", TENTH, NO_WORSE, SST2),
    _claim(SMALL, "SST-2, r = 0.1 % against 10 %", SHARE, "clip.quantile_budget=0.001", TENTH, NO_WORSE, SST2),
    _claim(SMALL, "SST-2, r = 1 % against 10 %", SHARE, "clip.quantile_budget=0.01", TENTH, NO_WORSE, SST2),
    _claim(HELPS_LESS, "CIFAR-10", "adaptivity", BOTH, CROSSED, MORE, CIFAR),
    _claim(HELPS_LESS, "SST-2", "adaptivity", BOTH, CROSSED, MORE, SST2),
    _claim(HELPS_LESS, FEATURES, "lite0_cifar", BOTH, CROSSED, MORE, CIFAR),
    _claim(ADAPTIVE_ON_PAR, "CIFAR-10", "adaptivity", ADAPTIVE, "clip=adaptive_flat", ALIKE, CIFAR),
    _claim(ADAPTIVE_ON_PAR, "SST-2", "adaptivity", ADAPTIVE, "clip=adaptive_flat", ALIKE, SST2),
    _claim(ADAPTIVE_ON_PAR, FEATURES, "lite0_cifar", ADAPTIVE, "clip=adaptive_flat", ALIKE, CIFAR),
)
