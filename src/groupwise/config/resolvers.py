"""Values of `conf/` that depend on other keys: ``threshold: ${by_mode:{fixed_*:0.1, *:1.0}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from groupwise.errors import UserError


def register_resolvers() -> None:
    """Make ``by``, ``by_mode``, ``by_epsilon`` and ``joint`` known to OmegaConf; repeatable."""
    for resolver in (by, by_mode, by_epsilon, joint):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def by(name: object, table: Mapping[Any, Any]) -> Any:
    """``${by:${model.name},{roberta_large:512,*:1024}}``: the first entry whose pattern the name matches.

    Raises:
        UserError: none does.
    """
    for pattern, value in table.items():
        if fnmatchcase(str(name), str(pattern)):
            return value
    raise UserError(f"{name} is not one of {', '.join(map(str, table))}: give the value that depends on it yourself.")


def by_mode(table: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """``${by_mode:{adaptive_*:0.85, *:0.6}}``: as `by`, of the name of the clipping mode."""
    return by(_root_.clip.name, table)


def by_epsilon(table: Mapping[float, Any], *, _root_: DictConfig) -> Any:
    """``${by_epsilon:{3:40, 8:20}}``: the entry at ε, or at the ε nearest to it (`at_epsilon`)."""
    return at_epsilon(table, _root_.privacy.epsilon)


def joint(threshold: float, groups: int) -> float:
    """``${joint:1e-5,${pipeline.stages}}``: the C of that many groups which each clip to that threshold."""
    return threshold * math.sqrt(groups) if groups > 0 else threshold


def at_epsilon(table: Mapping[float, Any], epsilon: float | None) -> Any:
    """The entry of ``table`` at ``epsilon``, else at the epsilon nearest in ratio, ties to the smaller.

    Without noise (inf) it is the entry of the largest one, which may be inf itself. If the noise multiplier is given
    instead (None), it is that of the largest finite one. Raises `UserError` for an epsilon that is not positive.
    """
    known = sorted(table)
    if epsilon == math.inf:
        return table[known[-1]]
    if epsilon is None:
        return table[max((entry for entry in known if entry < math.inf), default=math.inf)]
    if not epsilon > 0:
        raise UserError(f"privacy.epsilon={epsilon:g} must be greater than zero.")
    return table[min(known, key=lambda entry: abs(math.log(entry / epsilon)))]
