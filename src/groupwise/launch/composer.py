"""Many configurations of one folder, composed quickly: cells that choose the same options share Hydra's work."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from groupwise.launch.tables import Tables


class Composer:
    """Composes as `hydra.compose` does inside of `initialize_config_dir`; what differs in plain values is a copy."""

    def __init__(self, conf: Path) -> None:
        self._conf = conf
        self._tables = Tables(conf)
        self._parser = OverridesParser.create()
        self._chosen: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of `overrides`; raises what Hydra raises."""
        given = self._parser.parse_overrides(list(overrides))
        options = [item for item in given if item.package or self._is_group(item.key_or_group)]
        key = tuple(str(item.input_line) for item in options)
        if key not in self._chosen:
            self._chosen[key] = compose("config", list(key))
        composed = copy.deepcopy(self._chosen[key])
        ConfigLoaderImpl._apply_overrides_to_config([item for item in given if item not in options], composed)
        return composed

    def _is_group(self, key: str) -> bool:
        return (self._conf / key).is_dir() or bool(self._tables.parts(key))
