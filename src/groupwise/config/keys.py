"""All keys of the command line, their types and allowed values, and the names of other libraries for them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from groupwise.config.schema import RunConfig
from groupwise.rows import SCALES

FREE = {
    "clip.mapping": "'+clip.mapping={stem*:early,*:late}'",
    "model.shape": "'+model.shape={n_layer:2}'",
    "own_task": "'+own_task.hidden=4'",
}
"""Mappings whose keys are the user's own, and an example of how to give one."""


def _keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield dotted key, type and metadata of all sections (``clip``) and their fields (``clip.threshold``)."""
    kinds = get_type_hints(schema)
    for item in fields(schema):
        kind = kinds[item.name]
        yield prefix + item.name, kind, item.metadata
        if is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]


@cache
def key_types(schema: type = RunConfig) -> dict[str, Any]:
    """Return dotted key -> type, for sections and their fields."""
    return {key: kind for key, kind, _ in _keys(schema)}


CHOICES: dict[str, tuple[str, ...]] = {key: data["choices"] for key, _, data in _keys(RunConfig) if "choices" in data}
"""Key -> its allowed words."""
LIMITS = {key: rules for key, _, rules in _keys(RunConfig) if "within" in rules}
"""Key -> the allowed range of its number."""


def groups(conf: Path) -> dict[str, list[str]]:
    """Return the groups of `conf/` that users choose from, with their options."""
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
"""The name of a setting in Opacus, JAX Privacy, TensorFlow Privacy or transformers -> its name here."""
