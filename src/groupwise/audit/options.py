"""From the command line to what is audited: the user's overrides, and the batch, steps and optimiser of a design."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import groupwise
from groupwise.audit.canaries import MODELS
from groupwise.audit.game import Setting
from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.launch.compose import compose_run

CONF = Path(groupwise.__file__).resolve().parents[2] / "conf"
TAKEN = ("clip", "noise", "privacy", "pipeline", "train.microbatch")
DEVICE = ("clip=per_device", "clip=adaptive_device", "clip.grouping=device")
DELTA = 1e-5
MOST = {"layers": 20_000, "tied": 20_000, "lora": 4000, "codes": 1024}
"""Canaries of a model: a frozen layer of the adapters has as many weights as canaries squared."""
MOST_STAGES = 16


@dataclass(frozen=True)
class Design:
    """How often canaries are drawn, and what is read of them.

    Args:
        sample_rate: ρ. steps: T. canaries: m, unless asked otherwise.
    """

    sample_rate: float
    steps: int
    canaries: int
    says: str


DESIGNS = {
    "full": Design(1.0, 1, 4000, "one release of all canaries that are in the data"),
    "poisson": Design(0.25, 4, 4000, "four Poisson samples at rate 1/4"),
    "counts": Design(1.0, 1, 512, "one release, whose counts tell canaries apart: 512 layers"),
}


def make_setting(
    overrides: Sequence[str],
    *,
    design: str = "full",
    model: str = "layers",
    canaries: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    conf: Path = CONF,
) -> Setting:
    """What to audit, from ``clip=... privacy.epsilon=...`` and the like.

    Raises:
        UserError: what no audit of this kind can tell.
    """
    if design not in DESIGNS:
        raise UserError(f"--design {design} is not one of {', '.join(DESIGNS)}.")
    if model not in MODELS:
        raise UserError(f"--model {model} is not one of {', '.join(MODELS)}.")
    if not 0.5 <= confidence < 1.0:
        raise UserError(f"--confidence {confidence:g} must lie in [0.5, 1).")
    if seed < 0:
        raise UserError(f"--seed {seed} must be zero or more.")
    chosen = DESIGNS[design]
    m = canaries or (chosen.canaries if model != "lora" else min(chosen.canaries, 1500))
    if (design == "counts") != (model == "codes"):
        if design == "counts" and model != "layers":
            raise UserError(f"--design counts has a model of its own: leave out --model {model}.")
        if model == "codes":
            raise UserError("--model codes is what --design counts uses: give that.")
        model = "codes"
    if not 16 <= m <= MOST[model] or (model == "codes" and m & (m - 1)):
        power = ", and a power of two" if model == "codes" else ""
        raise UserError(f"--canaries {m} must be from 16 to {MOST[model]} with this model{power}.")
    _check_overrides(overrides)
    config = compose_run(_overrides(overrides, chosen, m, seed), conf)
    _check(config, design, model)
    batch = max(1, round(chosen.sample_rate * m))
    # A clipped canary then moves the weights by about one, well above their rounding.
    config.optim.learning_rate = batch / max(config.clip.threshold, config.clip.initial_threshold or 0.0)
    return Setting(config, model, design, m, seed, confidence)


def _overrides(given: Sequence[str], design: Design, canaries: int, seed: int) -> list[str]:
    device = any(item in DEVICE or item.startswith("pipeline.") for item in given)
    return [
        *(["task=samsum_pipeline", "scale=smoke"] if device else ["task=cifar", "scale=smoke"]),
        "optim=sgd",
        f"privacy.delta={DELTA}",
        *(["pipeline.stages=2", "clip.threshold=1.0"] if device else []),
        "train.microbatch=500",
        *given,
        "optim.schedule=constant",
        "optim.weight_decay=0",
        "optim.momentum=0",
        "optim.warmup=0",
        "train.batch_size=null",
        f"train.sample_rate={design.sample_rate}",
        f"train.steps={design.steps}",
        "train.device=cpu",
        f"seed={seed}",
        f"debug.noise_seed={seed}",
    ]


def _check_overrides(overrides: Sequence[str]) -> None:
    for item in overrides:
        key, equals, _ = item.lstrip("+~").partition("=")
        if not equals:
            raise UserError(f"{item} is not key=value: an audit takes overrides such as clip=flat privacy.epsilon=3.")
        if not any(key == taken or key.startswith(f"{taken}.") for taken in TAKEN):
            raise UserError(
                f"{item} cannot be audited: canaries are their own task, model, data and steps; give overrides of "
                "clip, noise, privacy, pipeline.stages and train.microbatch."
            )


def _check(config: RunConfig, design: str, model: str) -> None:
    clip, privacy = config.clip, config.privacy
    if clip.grouping == "none":
        raise UserError("clip=none claims no epsilon, so there is nothing to audit: choose a clipping mode.")
    if privacy.sampling != "poisson":
        raise UserError("privacy.sampling=shuffle claims no guarantee, so there is nothing to audit: leave it out.")
    if privacy.noise_multiplier == 0 or privacy.epsilon == float("inf"):
        raise UserError(
            "Without noise there is no finite epsilon to audit: give privacy.epsilon or privacy.noise_multiplier."
        )
    if config.pipeline.stages > MOST_STAGES:
        raise UserError(f"pipeline.stages={config.pipeline.stages} is a process each: give at most {MOST_STAGES}.")
    if config.pipeline.stages > 1:
        if clip.grouping == "flat":
            raise UserError(
                "An audit of a pipeline is per device, layer or block: for clip=flat leave out pipeline.stages."
            )
        if model != "layers":
            raise UserError("An audit of a pipeline has a model of its own: leave out --model and --design counts.")
    if design == "counts" and (clip.policy != "adaptive" or clip.grouping != "layer"):
        raise UserError("--design counts reads the counts of many layers: it takes clip=adaptive_layer.")
