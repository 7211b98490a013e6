"""The setting of an audit: the user's overrides, and the batch size, steps and optimiser of a design."""

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.checkout import CONF
from groupwise.config.compose import compose_run
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError

TAKEN = ("clip", "noise", "privacy", "pipeline", "train.microbatch")
REAL = ("task", "model", "data", "scale")
"""Overrides that select a real task."""
DEVICE = ("clip=per_device", "clip=adaptive_device", "clip.grouping=device")
DELTA = 1e-5
EXAMPLES = 4
"""Examples of a real task, unless data.train_limit is given. They are few, since thousands of steps use all of them."""
MOST = {"full": 20_000, "poisson": 20_000, "counts": 1024}
"""The largest number of canaries for each design."""
PLAYS = 500


@dataclass(frozen=True)
class Setting:
    """The setting of an audit.

    Args:
        config: the configuration of a run, with the batch size, steps and optimiser of the design.
        model: the canaries' model, "layers" or "codes", or the names of a real task and its model.
        design: a name in `DESIGNS`.
        canaries: m.
        plays: runs in each of the two worlds, for the design "worlds".
    """

    config: RunConfig
    model: str
    design: str
    canaries: int
    seed: int = 0
    plays: int = PLAYS


@dataclass(frozen=True)
class Design:
    """The sampling of canaries, and the evidence that is used.

    Args:
        sample_rate: ρ.
        steps: T.
        canaries: default of m.
        says: the description for --help.
        real: whether it trains a real task.
    """

    sample_rate: float
    steps: int
    canaries: int
    says: str
    real: bool = False


DESIGNS = {
    "full": Design(1.0, 1, 4000, "one release of all canaries that are in the data"),
    "poisson": Design(0.25, 4, 4000, "four Poisson samples at rate 1/4"),
    "counts": Design(1.0, 1, 512, "one release, whose counts distinguish canaries: 512 layers"),
    "worlds": Design(1.0, 1, 1, "a real task with and without one example, many times (task=...)", real=True),
}


def make_setting(
    overrides: Sequence[str], *, design: str = "full", canaries: int | None = None, seed: int = 0, plays: int = PLAYS
) -> Setting:
    """Return the setting of an audit from overrides such as ``clip=... privacy.epsilon=...``; ``task=`` is a real task.

    Raises:
        UserError: a setting that this kind of audit cannot test.
    """
    if seed < 0:
        raise UserError(f"--seed {seed} must be zero or more.")
    if plays < 2:
        raise UserError(f"--plays {plays} must be two or more.")
    if design == "full" and any(_is_of(item, REAL) for item in overrides):
        design = "worlds"
    chosen = DESIGNS[design]
    if chosen.real and canaries is not None:
        raise UserError(f"--design {design} audits a real task, which has no canaries: leave out --canaries.")
    m = chosen.canaries if canaries is None else canaries
    if not chosen.real and (not 16 <= m <= MOST[design] or (design == "counts" and m & (m - 1))):
        power = ", and a power of two" if design == "counts" else ""
        raise UserError(f"--canaries {m} must be from 16 to {MOST[design]} with this design{power}.")
    taken = (*TAKEN, *REAL) if chosen.real else TAKEN
    if other := next((item for item in overrides if not _is_of(item, taken)), None):
        raise UserError(
            f"{other} cannot be set: the audit chooses batch size, steps and optimiser; give overrides of clip, noise, "
            "privacy, pipeline.stages and train.microbatch, and for a real task of task, model, data, scale."
        )
    first = _of_a_real_task(overrides) if chosen.real else _beside(overrides)
    config = compose_run(_overrides(first, overrides, chosen, seed), CONF)
    _check(config, design)
    if chosen.real:
        name = f"{config.task} {config.model.name}".strip()
        return Setting(config, name, design, m, seed, plays)
    set_rate(config, max(1, round(chosen.sample_rate * m)))
    return Setting(config, "codes" if design == "counts" else "layers", design, m, seed)


def _of_a_real_task(given: Sequence[str]) -> list[str]:
    """Return overrides for a few examples of the task, unless others are given."""
    if not any(_is_of(item, ("task",)) for item in given):
        raise UserError("The audit of a real task needs a task: give task=sst2, task=cifar or another.")
    first = {"scale": "smoke", "data.train_limit": EXAMPLES}
    return [f"{key}={value}" for key, value in first.items() if not any(_is_of(item, (key,)) for item in given)]


def set_rate(config: RunConfig, batch: float) -> None:
    """Set the learning rate so that a clipped example moves the weights by about 1, well above rounding errors."""
    config.optim.learning_rate = batch / max(config.clip.threshold, config.clip.initial_threshold or 0.0)


def _beside(given: Sequence[str]) -> list[str]:
    """Return overrides for a task that completes the configuration; the canaries replace it."""
    if any(item in DEVICE or item.startswith("pipeline.") for item in given):
        threshold = [] if any("adaptive" in item for item in given) else ["clip.threshold=1.0"]  # they start elsewhere
        return ["task=samsum_pipeline", "scale=smoke", "pipeline.stages=2", *threshold]
    return ["task=cifar", "scale=smoke"]


def _overrides(first: Sequence[str], given: Sequence[str], design: Design, seed: int) -> list[str]:
    return [
        *first,
        "optim=sgd",
        f"privacy.delta={DELTA}",
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


def _is_of(item: str, keys: Sequence[str]) -> bool:
    """Return whether an override sets one of these keys, or a key below one of them."""
    key = item.lstrip("+~").partition("=")[0]
    return any(key == taken or key.startswith(f"{taken}.") for taken in keys)


def _check(config: RunConfig, design: str) -> None:
    clip, privacy = config.clip, config.privacy
    if clip.grouping == "none":
        raise UserError("clip=none has no epsilon to audit: choose a clipping mode.")
    if privacy.sampling != "poisson":
        raise UserError("privacy.sampling=shuffle has no guarantee to audit: leave it out.")
    if privacy.noise_multiplier == 0 or privacy.epsilon == float("inf"):
        raise UserError(
            "Without noise there is no finite epsilon to audit: give privacy.epsilon or privacy.noise_multiplier."
        )
    if config.pipeline.stages > 1:
        if clip.grouping == "flat":
            raise UserError("The audit of a pipeline does not support clip=flat: leave out pipeline.stages.")
        if DESIGNS[design].real:
            raise UserError("The audit of a real task uses one process: leave out pipeline.stages and clip=per_device.")
    if design == "counts" and (clip.policy != "adaptive" or clip.grouping != "layer" or config.pipeline.stages > 1):
        raise UserError("--design counts needs the counts of many layers: give clip=adaptive_layer on one device.")
