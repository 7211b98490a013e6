"""Refuses invalid configurations, and settings without effect, each in one sentence, before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from groupwise.atomic import why_unwritable
from groupwise.config.keys import CHOICES, LIMITS, expected, fits, key_types
from groupwise.config.schema import BELOW_ONE, INSIDE, NOT_NEGATIVE, POSITIVE, ClipConfig, RunConfig
from groupwise.errors import UserError, did_you_mean, reason

PLACES = (
    "paths.data", "paths.results", "resume", "export", "data.hub", "data.train_file",
    "model.source", "model.tokenizer", "model.weights",
)  # fmt: skip
WRITTEN = ("paths.results", "export")
"""Folders that a run makes."""
LARGEST_WHOLE, LARGEST = 2**62, 1e15
"""The largest seed, size or number of steps, and the largest other number: beyond them libraries overflow."""
GENERATION = ("e2e", "dart", "samsum")
"""Tasks of texts to be written; their model can be split into stages."""
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
}
"""Key, or section of keys -> the key on which its effect depends, and the values needed there."""
DEFAULTS = RunConfig()
IMAGE_MODELS = ("wide_resnet", "scatter_cnn", "lite0_head")


def validate(config: RunConfig) -> None:
    """Raise a `UserError` of one sentence for the first problem in ``config``."""
    checks = (
        _texts, _choices, _ranges, _places, _together, _evaluation, _privacy, _clipping, _pipeline, _recorded,
        _parallel,
    )  # fmt: skip
    for check in checks:
        for problem in check(config):
            raise UserError(problem)


def validate_clipping(clip: ClipConfig) -> None:
    """Raise a `UserError` of one sentence for the first problem in ``clip`` alone."""
    config = RunConfig(clip=clip)
    for key, kind in key_types(ClipConfig, "clip.").items():
        if not fits(value_at(config, key), kind):
            raise UserError(f"{key}={value_at(config, key)!r} does not fit: {expected(key)} was expected.")
    for check in (_choices, _ranges, _clipping):
        for problem in check(config):
            raise UserError(problem)


def value_at(config: RunConfig, key: str) -> object:
    """The value of a dotted key such as ``clip.threshold``."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _texts(section: object, prefix: str = "") -> Iterator[str]:
    """Text that no file and no terminal can show, and numbers out of range."""
    for item in fields(section):  # type: ignore[arg-type]
        key, value = prefix + item.name, getattr(section, item.name)
        if is_dataclass(value):
            yield from _texts(value, f"{key}.")
        elif isinstance(value, int) and abs(value) > LARGEST_WHOLE:
            yield f"{key}={value} is too large: give at most 2^62."
        elif isinstance(value, float) and LARGEST < abs(value) < math.inf:
            yield f"{key}={value} is too large: give at most {LARGEST:g} (of either sign)."
        elif "${" in str(value):
            yield f"{key}={value} would be read as a reference to another key: write it without ${{."
        elif not _plain(value):
            yield f"{key}={value} has control characters, or is no UTF-8: leave them out."


def _plain(value: object) -> bool:
    """Whether it and all its entries can be printed."""
    if isinstance(value, dict):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if isinstance(value, list):
        return all(map(_plain, value))
    return not any(c < " " or "\x7f" <= c < "\xa0" or "\ud800" <= c <= "\udfff" for c in str(value))


def _choices(config: RunConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = value_at(config, key)
        if value not in allowed:
            yield f"{key}={value} is not one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}."


def _ranges(config: RunConfig) -> Iterator[str]:
    for key, says in LIMITS.items():
        value: Any = value_at(config, key)
        if value is None:
            continue
        if says["within"] == POSITIVE and not value > 0:
            yield f"{key}={value} must be greater than zero."
        if says["within"] == NOT_NEGATIVE and not value >= 0:
            yield f"{key}={value} must be zero or more."
        if says["within"] == BELOW_ONE and not 0 <= value < 1:
            yield f"{key}={value} must lie in [0, 1)."
        if says["within"] == INSIDE and not 0 < value < 1:
            yield f"{key}={value} must lie strictly between 0 and 1."
        if not math.isfinite(value) and not says["infinite"]:
            yield f"{key}={value} must be finite."
        if says["most"] is not None and value > says["most"]:
            yield f"{key}={value} is more than {says['most']}: give less."


def _places(config: RunConfig) -> Iterator[str]:
    """Invalid names of folders or files, and folders that cannot be made; missing inputs are found later."""
    for key in PLACES:
        value = value_at(config, key)
        if value is None:
            continue
        if not str(value).strip():
            yield f"{key} is empty: give a folder, or leave {key} out."
        try:
            place = Path(str(value)).expanduser()
            os.stat(place)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass
        except (OSError, RuntimeError) as error:  # too long a name, or the home of nobody
            yield f"{key}={value} can be no path ({reason(error)}): give another."
        if key in WRITTEN and (why := why_unwritable(place)):
            yield f"{key}={value} cannot be written ({why}): give another folder."
    name = config.data.train_file
    if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
        yield f"data.train_file={name} leaves the folder of the data set: give the name of a file in it."


def _not_for(what: str, config: RunConfig, *keys: str) -> Iterator[str]:
    """Keys that have another value than by default, which does not go with ``what``."""
    for key in keys:
        if (value := value_at(config, key)) != value_at(DEFAULTS, key):
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"{key}={shown} is not for {what}: leave one of them out."


def _together(config: RunConfig) -> Iterator[str]:
    """Settings that do not go together."""
    data, model, train = config.data, config.model, config.train
    if config.own_task and not isinstance(config.own_task.get("_target_"), str):
        yield "own_task has no _target_: name the function that makes the task, own_task: {_target_: module.function}."
    if config.resume is not None and config.overwrite:
        yield f"resume={config.resume} with overwrite=true would throw away what is to be resumed: drop one of them."
    if (train.batch_size is None) == (train.sample_rate is None):
        both = "null" if train.batch_size is None else "given"
        yield f"train.batch_size and train.sample_rate are both {both}: give one, the other null."
    if any(not 0 <= epoch < math.inf for epoch in train.keep):
        yield f"train.keep={train.keep} are epochs: give numbers of zero or more."
    if model.frozen_dtype == "bfloat16" and train.precision != "bfloat16":
        yield "model.frozen_dtype=bfloat16 needs train.precision=bfloat16, as float32 layers meet frozen ones."
    if model.pool == "mean" and model.trains == "lora":
        yield "model.pool=mean is not for model.trains=lora: choose one of the two."
    if model.pool == "mean" and config.export is not None:
        yield "export with model.pool=mean would be read by others as if its head took the first token: drop one."
    if data.public:
        yield from _not_for("data.public=true, which takes the key of the noise from seed", config, "debug.noise_seed")
    if model.name in IMAGE_MODELS:
        texts = ("trains", "dropout", "attention_dropout", "untie", "rematerialize")
        yield from _not_for(f"model.name={model.name}", config, *(f"model.{key}" for key in texts))


def _evaluation(config: RunConfig) -> Iterator[str]:
    if config.explain:
        yield from _not_for("explain=true", config, "eval.shots")
    if config.eval.shots is not None and config.clip.grouping != "none":
        yield "eval.shots trains nothing, so there is nothing to clip: add clip=none."
    if not -100 <= config.eval.generate.length_penalty <= 100:
        yield f"eval.generate.length_penalty={config.eval.generate.length_penalty} must lie in [-100, 100]."


def _privacy(config: RunConfig) -> Iterator[str]:
    privacy = config.privacy
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        both = "null" if privacy.epsilon is None else "given"
        yield f"privacy.epsilon and privacy.noise_multiplier are both {both}: give one, the other null."
    if config.clip.grouping == "none":
        if privacy.noise_multiplier:
            yield (
                f"privacy.noise_multiplier={privacy.noise_multiplier} with clip.grouping=none would add "
                "noise to gradients of unbounded sensitivity: choose a clipping mode, or leave the noise out."
            )
        elif privacy.epsilon is not None and math.isfinite(privacy.epsilon):
            yield (
                f"privacy.epsilon={privacy.epsilon:g} cannot be kept without clipping "
                f"(clip={config.clip.name}): choose a clipping mode, or leave epsilon out."
            )


def _clipping(config: RunConfig) -> Iterator[str]:
    clip = config.clip
    if clip.norms == "ghost" and clip.grouping != "flat":
        yield (
            f"clip.norms=ghost needs the whole gradient's norm before its second backward, so "
            f"clip.grouping must be flat, not {clip.grouping}: use clip=ghost, or clip.norms=bookkeeping."
        )
    if clip.grouping == "custom" and not clip.mapping:
        yield (
            "clip.grouping=custom needs clip.mapping, a glob of layer names for each group, "
            "such as '+clip.mapping={stem*:early,*:late}'."
        )
    if clip.mapping and clip.grouping != "custom":
        yield f"clip.mapping is read only with clip.grouping=custom, not {clip.grouping}: drop one of them."
    if clip.rule != "min" and clip.gamma == 0:
        yield (f"clip.gamma=0 with clip.rule={clip.rule} divides by a zero norm: give a small number such as 0.01.")
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
        yield (
            f"clip.rescale=true with clip.grouping={clip.grouping} pins the one threshold to clip.threshold, so "
            "nothing adapts: use clip.rescale=false, or clip=flat."
        )


def _pipeline(config: RunConfig) -> Iterator[str]:
    """Settings that a pipeline cannot do, or that need thresholds or norms of other stages (Algorithm 2)."""
    clip, stages, blocks = config.clip, config.pipeline.stages, config.pipeline.blocks
    if blocks and (len(blocks) != stages or min(blocks) < 1):
        yield f"pipeline.blocks={blocks} must give each of the {stages} stages (pipeline.stages) one block or more."
    if stages == 1:
        return
    several = f"pipeline.stages={stages}"
    if config.task not in GENERATION:
        yield f"{several} is not for task={config.task}: choose one of {', '.join(GENERATION)}, or pipeline.stages=1."
    if clip.norms == "ghost":
        yield f"clip.norms=ghost is not for {several}: clip=flat does the same there, in two passes of the pipeline."
    if clip.grouping == "custom":
        yield f"clip.grouping=custom cannot tell the stages of {several} apart: use device, layer, block or flat."
    if clip.grouping in ("device", "layer", "block"):  # each stage adds its own noise
        if config.noise.allocation != "equal_budget":
            yield (
                f"noise.allocation={config.noise.allocation} needs the thresholds of all stages before any can add its "
                f"noise: use noise=equal_budget with {several}."
            )
        if clip.policy == "adaptive" and clip.rescale:
            yield f"clip.rescale=true needs the thresholds of all stages: use clip.rescale=false with {several}."
    keys = ("model.rematerialize", "train.compile", "eval.shots", "explain", "export")
    yield from _not_for(several, config, *keys)


def _recorded(config: RunConfig) -> Iterator[str]:
    """Settings that a CUDA graph of a microbatch cannot contain."""
    if not config.train.cuda_graph:
        return
    graph = "train.cuda_graph=true"
    yield from _not_for(graph, config, "train.compile", "model.rematerialize", "pipeline.stages")
    if config.train.device == "cpu":
        yield f"{graph} is for NVIDIA's GPUs: leave it out with train.device=cpu."
    if config.parallel.ranks > 1:
        yield from _not_for(graph, config, "parallel.kind")


def _parallel(config: RunConfig) -> Iterator[str]:
    """Settings that replicas cannot do, and clipping modes that sharded parameters cannot have."""
    clip, sharded = config.clip, config.parallel.kind == "fsdp"
    if sharded and config.pipeline.stages > 1:
        yield "parallel.kind=fsdp is not for pipelines, whose stages are shards already: use parallel.kind=ddp."
    if config.parallel.ranks == 1:
        return
    yield from _not_for(f"parallel.ranks={config.parallel.ranks}", config, "eval.shots", "explain")
    if sharded:
        yield from _not_for("parallel.kind=fsdp", config, "train.compile", "export")
    if sharded and clip.grouping not in ("none", "layer") and clip.norms != "ghost":
        yield (
            f"parallel.kind=fsdp shards parameters layer by layer, and clip.grouping={clip.grouping} needs all at "
            "once: use clip=adaptive_layer, fixed_layer or ghost, or parallel.kind=ddp."
        )


def why_unused(key: str, config: RunConfig) -> str:
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


def refuse_unused(overrides: Sequence[str], config: RunConfig) -> None:
    """Refuse settings on a command line that have no effect; recipes may have them.

    Raises:
        UserError: naming one.
    """
    for override in (each.lstrip("+") for each in overrides):
        if why := why_unused(override.partition("=")[0], config):
            raise UserError(f"{override} changes nothing: {why}")
