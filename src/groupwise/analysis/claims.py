"""The paper's claims as differences between cells."""

from collections.abc import Mapping
from dataclasses import dataclass

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
OURS = ("scatter_cnn", "lite0_cifar")
"""Sweeps on a model that is not the paper's, at whatever scale."""
CIFAR, SST2 = {"task": "cifar"}, {"task": "sst2", "model": "roberta_base"}


def _clip(*names: str) -> tuple[Mapping[str, str], ...]:
    return tuple({"clip": name} for name in names)


def _both(says: str, sweep: str, plus: tuple[str, ...], minus: tuple[str, ...], kind: str) -> tuple[Claim, ...]:
    tasks = {"CIFAR-10": CIFAR, "SST-2": SST2}
    return tuple(
        Claim(says, on, Contrast(sweep, _clip(*plus), _clip(*minus), where), kind) for on, where in tasks.items()
    )


NOISELESS = {"task": "cifar", "privacy": "noiseless"}
WITHOUT_NOISE = "CIFAR-10 without noise"
TABLES = ("table2text", "E2E and DART")
LOSES = "Fixed per-layer clipping loses to flat clipping"
RECOVER = "Adaptive thresholds recover what fixed ones lose per layer"
ON_PAR = "Adaptive per-layer clipping is on par with flat clipping"
HELPS_LESS = "Adaptivity helps flat clipping less than per-layer clipping"
ADAPTIVE_ON_PAR = "Adaptive per-layer clipping is on par with adaptive flat clipping"
ANCHORS = (("scatter_cnn", "CIFAR-10, scattering network"), ("lite0_cifar", "CIFAR-10, head on features of ImageNet"))


def _noiseless(says: str, plus: str, minus: str, kind: str) -> Claim:
    return Claim(says, WITHOUT_NOISE, Contrast("adaptive_vs_fixed", _clip(plus), _clip(minus), NOISELESS), kind)


def _anchors(
    says: str, plus: tuple[str, ...], minus: tuple[str, ...], kind: str, anchors: tuple[tuple[str, str], ...] = ANCHORS
) -> tuple[Claim, ...]:
    return tuple(Claim(says, on, Contrast(sweep, _clip(*plus), _clip(*minus), CIFAR), kind) for sweep, on in anchors)


def _on_par(on: str, sweep: str, where: Mapping[str, str]) -> Claim:
    return Claim(ON_PAR, on, Contrast(sweep, _clip("adaptive_layer"), _clip("flat"), where), ALIKE)


def _texts(says: str, sweep: tuple[str, str], plus: str, minus: str, kind: str) -> tuple[Claim, ...]:
    name, on = sweep
    return tuple(
        Claim(says, f"{on}, {label}", Contrast(name, _clip(plus), _clip(minus), metric=metric), kind)
        for label, metric in (("BLEU", "test/bleu"), ("ROUGE-L", "test/rougeL"))
    )


CLAIMS = (
    *_both(LOSES, "fixed_per_layer", ("fixed_layer",), ("flat",), LESS),
    _noiseless(LOSES, "fixed_layer", "flat", LESS),
    *_anchors(LOSES, ("fixed_layer",), ("flat",), LESS),
    *_both(RECOVER, "adaptivity", ("adaptive_layer",), ("fixed_layer",), MORE),
    _noiseless(RECOVER, "adaptive_layer", "fixed_layer", MORE),
    *_anchors(RECOVER, ("adaptive_layer",), ("fixed_layer",), MORE),
    _on_par("CIFAR-10", "cifar", CIFAR),
    _noiseless(ON_PAR, "adaptive_layer", "flat", ALIKE),
    *_anchors(ON_PAR, ("adaptive_layer",), ("flat",), ALIKE),
    _on_par("SST-2, RoBERTa-base", "adaptivity", SST2),
    _on_par("SST-2, RoBERTa-base, attention only", "sst2_epochs", SST2),
    _on_par("SST-2, RoBERTa-large, attention only", "sst2_epochs", SST2 | {"model": "roberta_large"}),
    *_texts(LOSES, TABLES, "fixed_layer", "flat", LESS),
    *_texts(RECOVER, TABLES, "adaptive_layer", "fixed_layer", MORE),
    *_texts(ON_PAR, TABLES, "adaptive_layer", "flat", ALIKE),
    *_texts(ON_PAR, ("runtime_metrics", "E2E, run for the figures of time"), "adaptive_layer", "flat", ALIKE),
    *(
        Claim(
            "How the noise is shared among layers hardly matters",
            f"SST-2, {label} against global",
            Contrast("noise_allocation", ({"noise": noise},), ({"noise": "global"},), SST2),
            ALIKE,
        )
        for noise, label in (("equal_budget", "equal budget"), ("weighted", "weighted"))
    ),
    *(
        Claim(
            "A small share r of the budget suffices for the quantiles",
            f"SST-2, r = {share} % against 10 %",
            Contrast("quantile_budget", ({"clip.quantile_budget": r},), ({"clip.quantile_budget": "0.1"},), SST2),
            NO_WORSE,
        )
        for r, share in (("0.0001", "0.01"), ("0.001", "0.1"), ("0.01", "1"))
    ),
    *_both(HELPS_LESS, "adaptivity", ("adaptive_layer", "flat"), ("fixed_layer", "adaptive_flat"), MORE),
    *_anchors(HELPS_LESS, ("adaptive_layer", "flat"), ("fixed_layer", "adaptive_flat"), MORE, ANCHORS[1:]),
    *_both(ADAPTIVE_ON_PAR, "adaptivity", ("adaptive_layer",), ("adaptive_flat",), ALIKE),
    *_anchors(ADAPTIVE_ON_PAR, ("adaptive_layer",), ("adaptive_flat",), ALIKE, ANCHORS[1:]),
)
