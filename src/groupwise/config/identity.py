"""The hash of a configuration, which identifies an experiment and names the run's folder."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config.keys import FREE
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason

VOLATILE = (
    "paths.",
    "tracker.",
    "resume",
    "overwrite",
    "explain",
    "export",
    "train.checkpoint_every",
    "train.cuda_graph",
    "train.matmul",
    "clip.formula",
    "pipeline.timeout",
)
"""Keys that are not in the hash. They affect at most rounding, and the masks of dropout (`train.cuda_graph`). All other
keys are in the hash, also `debug.noise_seed`, and `train.device` as it is written: ``auto`` is the same experiment on
every machine, and the row has the device that was used."""

LATER = {
    "own_task": "{}",
    "noise.secure": False,
    "data.public": False,
    "model.rematerialize": False,
    "train.deterministic": False,
}
"""Keys added after the first committed rows, with the value in those rows. With that value they are not in the hash."""

GONE = {
    "data.corpus": None,
    "eval.generate.no_repeat_ngram": 0,
    "model.block_order": "deepmind",
    "model.norm": "group",
    "pipeline.balance": "parameters",
    "pipeline.schedule": "1f1b",
    "clip.count_at": "raw",
}
"""Keys in the hash of committed rows that are no longer in the schema, with their value in all rows."""

SIZES = ("eval.batch_size", "eval.generate.batch_size")
"""Keys that may change when a run is resumed, for an evaluation that did not fit into memory."""


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return dotted key -> plain value, `GONE` included. A composed or loaded configuration has the schema's types."""
    return flatten(asdict(config)) | GONE


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Map ``{"a": {"b": 1}}`` to ``{"a.b": 1}``. Lists, and mappings with keys of the user's own, become JSON text."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = json.dumps(value) if isinstance(value, list | tuple | Mapping) else value
    return flat


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of the configuration without its `VOLATILE` keys, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(stable_config(config), sort_keys=True).encode()).hexdigest()


def differences(there: RunConfig, here: RunConfig) -> list[str]:
    """Return the differences that prevent resuming a run, such as ``clip.threshold is 1.0 there and 0.5 here``."""
    old, new = _settings(there), _settings(here)
    differing = [key for key in new if old[key] != new[key] and key not in SIZES]
    return [f"{key} is {old[key]} there and {new[key]} here" for key in differing]


def save_config(config: RunConfig) -> str:
    """Return the configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_config(path: Path) -> RunConfig:
    """Read a file of `save_config`. Keys that are no longer in the schema are dropped if they had no effect.

    Raises `UserError` if the file is missing, or does not fit the schema.
    """
    try:
        written: Any = OmegaConf.load(path)
        for key, value in GONE.items():
            section, _, name = key.rpartition(".")
            inside = OmegaConf.select(written, section) or {}
            if name in inside and inside[name] == value:
                del inside[name]
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), written))
    except (OSError, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a run's config ({reason(error)}): restore it, or start a new run.") from error
    assert isinstance(config, RunConfig)
    return config


def stable_config(config: RunConfig) -> dict[str, Any]:
    """Return dotted key -> plain value, without the `VOLATILE` keys: the content of the hash."""
    return {key: value for key, value in _settings(config).items() if key not in LATER or value != LATER[key]}


def _settings(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in flat_config(config).items() if not key.startswith(VOLATILE)}
