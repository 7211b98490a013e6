"""Lists every key of the command line with its type and allowed values, from the schema, and other libraries' names."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from groupwise.config.schema import RunConfig
from groupwise.rows import SCALES

IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
FREE = {
    "clip.mapping": "'+clip.mapping={stem*:early,*:late}'",
    "model.shape": "'+model.shape={n_layer:2}'",
    "own_task": "'+own_task.hidden=4'",
}
"""Mappings whose keys users define themselves, and how an entry is given."""


@cache
def key_types(schema: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type, sections (``clip``) as well as their fields (``clip.threshold``)."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        found[prefix + name] = kind
        if is_dataclass(kind):
            found |= key_types(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


def _said(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each key with the docstring of its field."""
    kinds = get_type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name, item.metadata
        if is_dataclass(kinds[item.name]):
            yield from _said(kinds[item.name], f"{prefix}{item.name}.")


CHOICES: dict[str, tuple[str, ...]] = {key: says["choices"] for key, says in _said() if "choices" in says}
"""Key -> the words that it takes."""
LIMITS = {key: says for key, says in _said() if "within" in says}
"""Key -> the range of its number."""


def expected(key: str) -> str:
    """The values that ``key`` takes, in words: "a number or null"."""
    kind = key_types().get(key, str)  # what has no type is an entry of a mapping of the user's own
    if is_dataclass(kind):
        return f"{key}.<key>=<value>"
    if get_origin(kind) is dict:
        return "{name:value,...}"
    if get_origin(kind) is list:
        return "[name,...]" if get_args(kind) == (str,) else "[number,...]"
    return " or ".join(IN_WORDS[part] for part in get_args(kind) or (kind,))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of that type; OmegaConf checks scalars, but not lists that come from an interpolation."""
    if get_origin(kind) in (list, dict):
        items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        return isinstance(value, get_origin(kind)) and all(fits(item, get_args(kind)[-1]) for item in items)
    if kind is Any or is_dataclass(kind):
        return True
    return isinstance(value, float | int) if kind is float else isinstance(value, get_args(kind) or kind)


def groups(conf: Path) -> dict[str, list[str]]:
    """The groups of `conf/` that a person chooses from, with their options."""
    chosen = (folder for folder in conf.iterdir() if folder.is_dir() and folder.name not in ("recipe", "size", "hydra"))
    files = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in chosen}
    return dict(sorted({**files, "scale": sorted(SCALES)}.items()))


OURS = {
    "module": "model",
    **dict.fromkeys(("data_loader", "dataloader", "train_loader", "dataset"), "data"),
    **dict.fromkeys(("criterion", "loss_fn", "loss"), "losses"),
    **dict.fromkeys(("target_epsilon", "eps"), "epsilon"),
    "target_delta": "delta",
    **dict.fromkeys(("sigma", "noise_scale", "noise_std"), "noise_multiplier"),
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "clipping_norm", "max_norm", "clip_norm"), "threshold"),
    **dict.fromkeys(("clipping", "clipping_mode", "grad_sample_mode"), "clip"),
    **dict.fromkeys(("expected_batch_size", "logical_batch_size", "bs"), "batch_size"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "n_steps", "total_steps"), "steps"),
    **dict.fromkeys(("physical_batch_size", "max_physical_batch_size", "micro_batch_size"), "microbatch"),
    "gradient_accumulation_steps": "microbatch",
    "lr": "learning_rate",
    "wd": "weight_decay",
}
"""A setting's name in Opacus, JAX Privacy, TensorFlow Privacy or transformers -> its name here."""
