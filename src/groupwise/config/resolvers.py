"""Resolvers for values in `conf/` that depend on other keys: ``threshold: ${by_mode:{fixed_*:0.1, *:1.0}}``."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from groupwise.errors import UserError


def register_resolvers() -> None:
    """Register ``by``, ``by_mode``, ``by_epsilon`` and ``joint`` with OmegaConf. May be called again."""
    for resolver in (by, by_mode, by_epsilon, joint):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def by(name: object, table: Mapping[Any, Any]) -> Any:
    """``${by:${model.name},{roberta_large:512,*:1024}}``: the first entry whose pattern matches the name.

    Raises `UserError` if none matches.
    """
    for pattern, value in table.items():
        if fnmatchcase(str(name), str(pattern)):
            return value
    raise UserError(f"{name} is not one of {', '.join(map(str, table))}: set the key that depends on it.")


def by_mode(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """``${by_mode:{adaptive_*:0.85, *:0.6}}``: as `by`, for the name of the clipping mode."""
    return by(_root_.clip.name, table)


def by_epsilon(table: Mapping[float, Any], *, _root_: DictConfig) -> Any:
    """``${by_epsilon:{3:40, 8:20}}``: the entry for ε, or for the nearest ε (`at_epsilon`)."""
    return at_epsilon(table, _root_.privacy.epsilon)


def joint(threshold: float, groups: int) -> float:
    """``${joint:1e-5,${pipeline.stages}}``: C for this number of groups that each clip to this threshold."""
    return threshold * math.sqrt(groups) if groups > 0 else threshold


def at_epsilon(table: Mapping[float, Any], epsilon: float | None) -> Any:
    """Return the entry of ``table`` for the epsilon nearest in ratio, or the smaller one of two that are equally near.

    Without noise (inf) it is the entry for the largest epsilon, which may be inf. If the noise multiplier is given
    instead (None), it is the entry for the largest finite epsilon. Raises `UserError` unless epsilon is positive.
    """
    known = sorted(table)
    if epsilon == math.inf:
        return table[known[-1]]
    if epsilon is None:
        return table[max((entry for entry in known if entry < math.inf), default=math.inf)]
    if not epsilon > 0:
        raise UserError(f"privacy.epsilon={epsilon:g} must be greater than zero.")
    return table[min(known, key=lambda entry: abs(math.log(entry / epsilon)))]
