"""Finds settings that have no effect given the others, and refuses them on a command line."""

from collections.abc import Sequence

from groupwise.config.checks import value_at
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError

ADAPTIVE = (
    *("initial_threshold", "target_quantile", "quantile_learning_rate", "quantile_budget"),
    *("rescale", "minimum", "maximum"),
)
READ_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"clip.{name}": ("clip.policy", ("adaptive",)) for name in ADAPTIVE},
    "clip.gamma": ("clip.rule", ("automatic",)),
    "model.lora": ("model.trains", ("lora",)),
    "optim.momentum": ("optim.name", ("sgd",)),
    **dict.fromkeys(("optim.beta1", "optim.beta2", "optim.eps"), ("optim.name", ("adam", "adamw"))),
    **dict.fromkeys(("tuning.eta", "tuning.runs", "tuning.outside"), ("tuning.name", ("accounted",))),
}
"""Key, or section of keys -> the key on which its effect depends, and the values needed there."""


def why_idle(key: str, config: RunConfig) -> str:
    """Why a key has no effect, and what to do; empty if it has one."""
    clip, steps = config.clip, config.train.steps
    if key.startswith("clip.") and clip.grouping == "none":
        return "" if key in ("clip.name", "clip.grouping", "clip.policy") else "nothing is clipped, so leave it out."
    if needed := READ_WITH.get(key) or READ_WITH.get(key.rpartition(".")[0]):
        beside, values = needed
        if (value := value_at(config, beside)) not in values:
            return f"it is not read with {beside}={value}, so leave it out, or choose {beside}={' or '.join(values)}."
    if key == "clip.threshold" and clip.policy == "adaptive" and clip.initial_threshold and not clip.rescale:
        return (
            f"these thresholds start at clip.initial_threshold={clip.initial_threshold:g} and are not held to C "
            "(clip.rescale=false), so give one of these two."
        )
    return f"train.steps={steps} is given, so make one of them null." if key == "train.epochs" and steps else ""


def complaint(override: str, config: RunConfig) -> str:
    """The sentence for an override, ``key=value``, without effect; empty if it has one."""
    override = override.lstrip("+")
    why = why_idle(override.partition("=")[0], config)
    return why and f"{override} changes nothing: {why}"


def refuse_idle(overrides: Sequence[str], config: RunConfig) -> None:
    """Refuse settings on a command line that have no effect; recipes may have them.

    Raises:
        UserError: naming one.
    """
    for override in overrides:
        if problem := complaint(override, config):
            raise UserError(problem)
