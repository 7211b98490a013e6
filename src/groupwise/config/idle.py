"""Finds settings that have no effect given the others, and refuses them on a command line."""

from collections.abc import Sequence

from groupwise.config.schema import ClipConfig, RunConfig
from groupwise.errors import UserError

ADAPTIVE = (
    *("initial_threshold", "target_quantile", "quantile_learning_rate", "quantile_budget"),
    *("rescale", "count_at", "minimum", "maximum"),
)
READ_WITH = {
    **dict.fromkeys(ADAPTIVE, ("policy", "adaptive", "clip=adaptive_layer")),
    "gamma": ("rule", "automatic", "clip.rule=automatic"),
}
"""Field of `ClipConfig` -> the field on which its effect depends, the value needed there, and how to choose it."""


READ_BY = {
    ("optim", "momentum"): ("sgd",),
    **dict.fromkeys((("optim", "beta1"), ("optim", "beta2"), ("optim", "eps")), ("adam", "adamw")),
    **{("tuning", name): ("accounted",) for name in ("eta", "runs", "outside")},
}
"""Other fields that have an effect only with some names of their section."""


def why_idle(name: str, clip: ClipConfig) -> str:
    """Why a field of ``clip`` has no effect, and what to do; empty if it has one."""
    if clip.grouping == "none":
        return "" if name in ("name", "grouping", "policy") else "nothing is clipped, so leave it out."
    beside, value, choose = READ_WITH.get(name, ("name", clip.name, ""))
    if getattr(clip, beside) != value:
        return f"it is not read with clip.{beside}={getattr(clip, beside)}, so leave it out, or choose {choose}."
    if name == "threshold" and clip.policy == "adaptive" and clip.initial_threshold is not None and not clip.rescale:
        return (
            f"these thresholds start at clip.initial_threshold={clip.initial_threshold:g} and are not held to C "
            "(clip.rescale=false), so give one of these two."
        )
    return ""


def complaint(override: str, config: RunConfig) -> str:
    """The sentence for an override, ``key=value``, without effect; empty if it has one."""
    override = override.lstrip("+")
    section, _, name = override.partition("=")[0].partition(".")
    if section == "model" and name.startswith("lora.") and config.model.trains != "lora":
        return f"{override} is of adapters; model.trains={config.model.trains}: add model.trains=lora."
    if (section, name) == ("train", "epochs") and config.train.steps is not None:
        return f"{override} changes nothing: train.steps={config.train.steps} is given, so make one of them null."
    why = why_idle(name, config.clip) if section == "clip" and name else ""
    names = READ_BY.get((section, name))
    if names and getattr(config, section).name not in names:
        why = f"it is read with {section}.name={' or '.join(names)} alone, so leave it out, or choose that."
    return why and f"{override} changes nothing: {why}"


def refuse_idle(overrides: Sequence[str], config: RunConfig) -> None:
    """Refuse settings on a command line that have no effect; recipes may have them.

    Raises:
        UserError: naming one.
    """
    for override in overrides:
        if problem := complaint(override, config):
            raise UserError(problem)
