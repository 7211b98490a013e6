"""Hands Hydra the parts of the tables in `conf/recipe/` and `conf/scales/`, as if each were a file."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from groupwise.config.tables import Tables

SCHEME = "tables"


class TablesPath(SearchPathPlugin):
    """Has Hydra look for parts of tables wherever it looks for files of configuration, and then in a folder of the
    user's own; Hydra itself takes --config-dir for single runs alone, not for a sweep's cells."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        main = next((entry.path for entry in search_path.get_path() if entry.provider == "main"), None)
        if main is not None and not main.startswith("pkg://"):
            search_path.append("groupwise", f"{SCHEME}://{main.removeprefix('file://')}")
            if folder := os.environ.get("GROUPWISE_CONFIG"):  # keys.CONFIG_DIR; importing it would cost every start
                search_path.append("groupwise", f"file://{folder}")


class TablesSource(ConfigSource):
    """The parts of the tables in one folder (`groupwise.config.tables`)."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    @cached_property
    def _tables(self) -> Tables:
        from groupwise.config.tables import Tables  # not before a configuration is composed

        return Tables(Path(self.path))

    def load_config(self, config_path: str) -> ConfigResult:
        part = self._tables.part(config_path)
        if part is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        header: dict[str, str | None] = {"package": None if config_path.startswith("model/") else "_global_"}
        return ConfigResult(self.provider, f"{SCHEME}://{self.path}", OmegaConf.create(part.values), header)

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return bool(self._tables.parts(config_path))

    def is_config(self, config_path: str) -> bool:
        return self._tables.part(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter == ObjectType.GROUP else self._tables.parts(config_path)
