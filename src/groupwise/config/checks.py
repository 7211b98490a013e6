"""Checks a configuration before anything is loaded. Each error message is one sentence."""

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from operator import attrgetter
from os.path import expanduser
from pathlib import Path
from typing import Any

from groupwise.atomic import why_unwritable
from groupwise.config.keys import CHOICES, LIMITS, key_types
from groupwise.config.schema import BELOW_ONE, INSIDE, NOT_NEGATIVE, POSITIVE, ClipConfig, RunConfig
from groupwise.errors import UserError, did_you_mean

WRITTEN = ("paths.results", "export")
"""Folders that a run creates."""
GENERATION = ("e2e", "dart", "samsum")
"""Text generation tasks, whose models can be split into stages."""
ADAPTIVE = (
    *("initial_threshold", "target_quantile", "quantile_learning_rate", "quantile_budget"),
    *("rescale", "minimum", "maximum"),
)
READ_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"clip.{name}": ("clip.policy", ("adaptive",)) for name in ADAPTIVE},
    "clip.gamma": ("clip.rule", ("automatic",)),
    "clip.mapping": ("clip.grouping", ("custom",)),
    "model.lora": ("model.trains", ("lora",)),
    "optim.momentum": ("optim.name", ("sgd",)),
    **dict.fromkeys(("optim.beta1", "optim.beta2", "optim.eps"), ("optim.name", ("adam", "adamw"))),
}
"""A key or section -> the key that its effect depends on, and the values of that key for which it has an effect."""
RANGES: dict[str, Callable[[float], bool]] = {
    POSITIVE: lambda value: value > 0,
    NOT_NEGATIVE: lambda value: value >= 0,
    BELOW_ONE: lambda value: 0 <= value < 1,
    INSIDE: lambda value: 0 < value < 1,
}
DEFAULTS = RunConfig()
TEXT_ONLY = {
    *(f"model.{key}" for key in ("source", "fresh", "architecture", "shape", "tokenizer", "pool", "attention")),
    *("model.frozen_dtype", "data.train_file", "data.hub", "data.max_length", "train.token_loss", "eval.generate"),
}
"""Keys, with all below them, that no image model reads."""
IMAGE_MODELS = ("wide_resnet", "scatter_cnn", "lite0_head")


def validate(config: RunConfig) -> None:
    """Raise a `UserError` for the first problem in ``config``."""
    for check in (_choices, _ranges, _places, _together, _privacy, _clipping, _pipeline, _recorded, _parallel):
        for problem in check(config):
            raise UserError(problem)


def validate_clipping(clip: ClipConfig) -> None:
    """Raise a `UserError` for the first problem in ``clip``; other sections are not checked."""
    config = RunConfig(clip=clip)
    for check in (_choices, _ranges, _clipping):
        for problem in check(config):
            raise UserError(problem)


def _choices(config: RunConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = attrgetter(key)(config)
        if value not in allowed:
            yield f"{key}={value} is not one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}."


def _ranges(config: RunConfig) -> Iterator[str]:
    for key, rules in LIMITS.items():
        value: Any = attrgetter(key)(config)
        if value is None:
            continue
        if not RANGES[rules["within"]](value):
            yield f"{key}={value} must be {rules['within']}."
        if value == math.inf and not rules["infinite"]:
            yield f"{key}={value} must be finite."
        if rules["most"] < value < math.inf:
            yield f"{key}={value} must be at most {rules['most']:g}."


def _places(config: RunConfig) -> Iterator[str]:
    """Folders that cannot be written, and a training file outside its folder. Missing inputs are found later."""
    for key in key_types():
        text = attrgetter(key)(config)
        if isinstance(text, str) and expanduser(text).startswith("~"):
            yield f"{key}={text} begins with the name of a user who does not exist: give another path."
    for key in WRITTEN:
        value: Any = attrgetter(key)(config)
        if value is not None and (why := why_unwritable(Path(value).expanduser()) if value else "it is empty"):
            yield f"{key}={value} cannot be written ({why}): give another folder."
    name = config.data.train_file
    if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
        yield f"data.train_file={name} is outside the data set's folder: give the name of a file inside it."
    tracker = config.tracker.name
    if tracker != "files" and find_spec(tracker) is None:
        yield f"tracker={tracker} needs the package {tracker}: install it by pip, or use tracker=files."


def _not_for(what: str, config: RunConfig, *keys: str) -> Iterator[str]:
    """Keys that cannot be combined with ``what`` and do not have their default value."""
    for key in keys:
        if (value := attrgetter(key)(config)) != attrgetter(key)(DEFAULTS):
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"{key}={shown} cannot be combined with {what}: leave one of them out."


def _together(config: RunConfig) -> Iterator[str]:
    """Settings that cannot be combined."""
    model, train = config.model, config.train
    if config.own_task and not isinstance(config.own_task.get("_target_"), str):
        yield "own_task has no _target_: name the function that makes the task, own_task: {_target_: module.function}."
    if config.resume is not None and config.overwrite:
        yield f"overwrite=true would delete the run that resume={config.resume} names: leave one of them out."
    if (train.batch_size is None) == (train.sample_rate is None):
        both = "null" if train.batch_size is None else "given"
        yield f"train.batch_size and train.sample_rate are both {both}: give one, and set the other to null."
    if any(not 0 <= epoch < math.inf for epoch in train.keep):
        yield f"train.keep={train.keep} are epochs: give numbers of zero or more."
    if model.frozen_dtype == "bfloat16" and train.precision != "bfloat16":
        yield "model.frozen_dtype=bfloat16 needs train.precision=bfloat16, since trained layers are float32."
    if model.pool == "mean" and model.trains == "lora":
        yield "model.pool=mean cannot be combined with model.trains=lora: choose one of the two."
    if model.pool == "mean" and config.export is not None:
        yield "export cannot store model.pool=mean: other programs would use the first token; leave one of them out."
    if config.data.public:
        yield from _not_for("data.public=true, which takes the noise key from seed", config, "debug.noise_seed")
    if model.name in IMAGE_MODELS:
        texts = ("trains", "dropout", "attention_dropout", "untie", "rematerialize")
        yield from _not_for(f"model.name={model.name}", config, *(f"model.{key}" for key in texts))
    if not -100 <= config.eval.generate.length_penalty <= 100:
        yield f"eval.generate.length_penalty={config.eval.generate.length_penalty} must be in [-100, 100]."
    if config.eval.shots is not None and config.clip.grouping != "none":
        yield "eval.shots does not train, so there is nothing to clip: add clip=none."
    if config.eval.shots is not None:
        yield from _not_for("eval.shots", config, "export", "explain")


def _privacy(config: RunConfig) -> Iterator[str]:
    privacy = config.privacy
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        both = "null" if privacy.epsilon is None else "given"
        yield f"privacy.epsilon and privacy.noise_multiplier are both {both}: give one, and set the other to null."
    if config.clip.grouping == "none":
        if privacy.noise_multiplier:
            yield (
                f"privacy.noise_multiplier={privacy.noise_multiplier} gives no guarantee with clip.grouping=none: the "
                "sensitivity is unbounded. Choose a clipping mode, or leave the noise out."
            )
        elif privacy.epsilon is not None and math.isfinite(privacy.epsilon):
            yield (
                f"privacy.epsilon={privacy.epsilon:g} cannot be guaranteed without clipping "
                f"(clip={config.clip.name}): choose a clipping mode, or leave epsilon out."
            )


def _clipping(config: RunConfig) -> Iterator[str]:
    clip = config.clip
    if clip.norms == "ghost" and clip.grouping != "flat":
        yield f"clip.grouping must be flat for clip.norms=ghost, not {clip.grouping}: use clip=ghost, or other norms."
    if clip.grouping == "custom" and not clip.mapping:
        yield "clip.grouping=custom needs clip.mapping, globs of layer names: '+clip.mapping={stem*:early,*:late}'."
    if clip.rule != "min" and clip.gamma == 0:
        yield f"clip.gamma=0 with clip.rule={clip.rule} divides by 0 if a norm is 0: give a small number such as 0.01."
    if clip.policy == "adaptive":
        yield from _adaptive(config)


def _adaptive(config: RunConfig) -> Iterator[str]:
    clip = config.clip
    if clip.grouping == "none":
        yield "clip.policy=adaptive has no threshold to adapt with clip.grouping=none: use clip.policy=fixed."
    if clip.minimum > clip.maximum:
        yield f"clip.minimum={clip.minimum} is above clip.maximum={clip.maximum}: swap them."
    one_group = clip.grouping == "flat" or (clip.grouping == "device" and config.pipeline.stages == 1)
    if clip.rescale and one_group:
        yield "clip.rescale=true rescales the only threshold to clip.threshold: use clip.rescale=false, or clip=flat."


def _pipeline(config: RunConfig) -> Iterator[str]:
    """Settings that a pipeline does not support, or that need thresholds or norms of other stages (Algorithm 2)."""
    clip, stages, blocks = config.clip, config.pipeline.stages, config.pipeline.blocks
    if blocks and (len(blocks) != stages or min(blocks) < 1):
        yield f"pipeline.blocks={blocks} must give each of the {stages} stages (pipeline.stages) one block or more."
    if stages == 1:
        return
    several = f"pipeline.stages={stages}"
    if config.task not in GENERATION:
        yield f"{several} does not support task={config.task}: choose {', '.join(GENERATION)}, or pipeline.stages=1."
    if clip.norms == "ghost":
        yield f"clip.norms=ghost cannot be combined with {several}: use clip=flat, which also takes two passes there."
    if clip.grouping == "custom":
        yield f"clip.grouping=custom is not supported with {several}: use device, layer, block or flat."
    if clip.grouping in ("device", "layer", "block"):  # each stage adds its own noise
        if config.noise.allocation != "equal_budget":
            yield f"noise={config.noise.allocation} needs the thresholds of all stages: use noise=equal_budget."
        if clip.policy == "adaptive" and clip.rescale:
            yield f"clip.rescale=true needs the thresholds of all stages: use clip.rescale=false with {several}."
    yield from _not_for(several, config, "model.rematerialize", "train.compile", "eval.shots", "explain", "export")


def _recorded(config: RunConfig) -> Iterator[str]:
    """Settings that cannot be combined with a CUDA graph of a microbatch."""
    if not config.train.cuda_graph:
        return
    graph = "train.cuda_graph=true"
    yield from _not_for(graph, config, "train.compile", "model.rematerialize", "pipeline.stages")
    if config.train.device == "cpu":
        yield f"{graph} needs an NVIDIA GPU: leave it out with train.device=cpu."
    if config.parallel.ranks > 1:
        yield from _not_for(graph, config, "parallel.kind")


def _parallel(config: RunConfig) -> Iterator[str]:
    """Settings that replicas do not support, and clipping modes that sharded parameters do not support."""
    clip, sharded = config.clip, config.parallel.kind == "fsdp"
    if sharded and config.pipeline.stages > 1:
        yield "parallel.kind=fsdp cannot be combined with pipeline stages: use parallel.kind=ddp."
    if config.parallel.ranks == 1:
        return
    yield from _not_for(f"parallel.ranks={config.parallel.ranks}", config, "eval.shots", "explain")
    if sharded:
        yield from _not_for("parallel.kind=fsdp", config, "train.compile", "export")
    if sharded and clip.grouping not in ("none", "layer") and clip.norms != "ghost":
        yield (
            f"parallel.kind=fsdp gathers one layer's parameters at a time, but clip.grouping={clip.grouping} needs "
            "several layers: use clip=adaptive_layer, fixed_layer or ghost, or parallel.kind=ddp."
        )


def why_unused(key: str, config: RunConfig) -> str:
    """Return why a key has no effect, and what to do; empty if it has one."""
    clip, steps = config.clip, config.train.steps
    if key.startswith("clip.") and clip.grouping == "none":
        return "" if key in ("clip.name", "clip.grouping", "clip.policy") else "nothing is clipped; leave it out."
    if {key, key.rpartition(".")[0]} & TEXT_ONLY and config.task == "cifar":
        return f"model.name={config.model.name} does not read it; leave it out."
    if needed := READ_WITH.get(key) or READ_WITH.get(key.rpartition(".")[0]):
        beside, values = needed
        if (value := attrgetter(beside)(config)) not in values:
            return f"it has no effect with {beside}={value}; leave it out, or choose {beside}={' or '.join(values)}."
    if key == "clip.threshold" and clip.policy == "adaptive" and clip.initial_threshold and not clip.rescale:
        return (
            f"the thresholds start at clip.initial_threshold={clip.initial_threshold:g} and are not rescaled to "
            "clip.threshold (clip.rescale=false); give only one of the two."
        )
    if key == "train.epochs" and steps:
        return f"train.steps={steps} is given; leave train.epochs out, or give train.steps=null."
    return ""


def refuse_unused(overrides: Sequence[str], *configs: RunConfig) -> None:
    """Check that each override of a command line has an effect on one of its runs. Those of a recipe may have none.

    Raises:
        UserError: an override has no effect, or both ε and σ are given.
    """
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    if "null" not in [given.get(f"privacy.{key}", "null") for key in ("epsilon", "noise_multiplier")]:
        raise UserError("privacy.epsilon and privacy.noise_multiplier are both given: set one of the two to null.")
    for override in (each.lstrip("+") for each in overrides):
        if all(reasons := [why_unused(override.partition("=")[0], config) for config in configs]):
            raise UserError(f"{override} changes nothing: {reasons[0]}")
