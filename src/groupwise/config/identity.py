"""The identity of an experiment: the hash of a configuration, which names the run's folder."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config.keys import FREE, key_types
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
"""Keys that change at most rounding, and which masks dropout draws (`train.cuda_graph`). All others count:
`debug.noise_seed`, and `train.device` as it is written (``auto`` is the same experiment on every machine; what it found
is in the row)."""


LATER = {
    "own_task": "{}",
    "clip.public_examples": 64,
    "clip.public_every": 10,
    "clip.public_power": 0.5,
    "noise.secure": False,
    "data.public": False,
    "data.flip": False,
    "data.crop": 0,
    "data.views": 1,
    "data.chat": False,
    "model.rematerialize": False,
    "train.deterministic": False,
    "train.ema": 0.0,
    "tuning.name": "off",
    "tuning.law": "negative_binomial",
    "tuning.eta": 0.0,
    "tuning.gamma": None,
    "tuning.runs": None,
    "tuning.target": "search",
    "tuning.outside": False,
    "tuning.keep": False,
}
"""Keys added after the first committed rows, with the value of those rows: at that value they are not in the hash.

The schema no longer has some of them, but records of older runs do.
"""

GONE = {
    "data.corpus": None,
    "eval.generate.no_repeat_ngram": 0,
    "model.block_order": "deepmind",
    "model.norm": "group",
    "pipeline.balance": "parameters",
    "pipeline.schedule": "1f1b",
    "clip.count_at": "raw",
}
"""Keys that were in the hash of committed rows and are no longer in the schema, with the value that all have."""

SIZES = ("eval.batch_size", "eval.generate.batch_size")
"""Keys that may change when a run is resumed, if its evaluation did not fit into memory."""


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> plain value, types as the schema has them (1 and 1.0 are the same rate), with what is `GONE`."""
    return flatten(_plain(config, type(config))) | GONE


def _plain(value: Any, kind: Any) -> Any:
    """A typed value as OmegaConf converts it, at a fiftieth of the time: sections as mappings, 1 as 1.0."""
    if is_dataclass(kind):
        return {name: _plain(getattr(value, name), of) for name, of in _hints(kind).items()}  # type: ignore[arg-type]
    if get_origin(kind) is list:
        return [_plain(item, get_args(kind)[0]) for item in value]
    return float(value) if type(value) is int and float in (kind, *get_args(kind)) else value


_hints = cache(get_type_hints)


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; a list, or a mapping with keys of the user's own, becomes JSON text."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = json.dumps(value) if isinstance(value, list | tuple | Mapping) else value
    return flat


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the canonical configuration without its `VOLATILE` keys, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(stable_config(config), sort_keys=True).encode()).hexdigest()


def differences(there: RunConfig, here: RunConfig) -> list[str]:
    """The stable keys that differ, so that a run cannot resume: ``clip.threshold is 1.0 there and 0.5 here``."""
    old, new = _settings(there), _settings(here)
    differing = [key for key in new if old[key] != new[key] and key not in SIZES]
    return [f"{key} is {old[key]} there and {new[key]} here" for key in differing]


def save_config(config: RunConfig) -> str:
    """The configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_config(path: Path) -> RunConfig:
    """Read the file of `save_config`, without keys that the schema has no longer and that changed nothing.

    Raises `UserError` if it is missing, or not of this schema.
    """
    try:
        written: Any = OmegaConf.load(path)
        for key, value in (GONE | LATER).items():
            section, _, name = key.rpartition(".")
            inside = OmegaConf.select(written, section) or {}
            if key not in key_types() and name in inside and inside[name] == value:
                del inside[name]
                if not inside:
                    del written[section]
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), written))
    except (OSError, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a run's config ({reason(error)}): restore it, or start afresh.") from error
    assert isinstance(config, RunConfig)
    return config


def stable_config(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> plain value, without the `VOLATILE` keys: the content of the hash."""
    return {key: value for key, value in _settings(config).items() if key not in LATER or value != LATER[key]}


def _settings(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in flat_config(config).items() if not key.startswith(VOLATILE)}
