"""Reads `conf/`: files as they are, and the parts that `conf/config.yaml` composes from the tables of a family.

`conf/recipe/<family>.yaml` holds what all clipping modes share and, under ``modes``, a row for each mode or for several
(``flat, ghost:``). `conf/scales/<family>.yaml` holds an entry for each scale: values, the ``default_model``, and under
``modes`` rows with exceptions. A part is a mapping inside a file, so Hydra alone says which part wins over which:

======================================  ====================================================
part                                    is
======================================  ====================================================
``family/<family>``                     the recipe without its modes
``recipe/<family>/<mode>``              the recipe's row of that mode
``scales/<family>/<scale>``             the entry of that scale, without its modes
``exceptions/<family>/<scale>/<mode>``  that entry's row of that mode
``model/default/<family>/<scale>``      the option of `conf/model/` that it names
``scale/<scale>``                       ``scale: <scale>``
======================================  ====================================================
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config.keys import FREE_KEYS, key_types
from groupwise.errors import UserError, did_you_mean, reason
from groupwise.rows import SCALES

MODES, DEFAULT_MODEL = "modes", "default_model"
"""What a table says beside keys of the schema."""


@dataclass(frozen=True)
class Part:
    """What one file says, or a mapping inside it."""

    file: Path
    trail: tuple[str, ...]
    """The keys that lead to the mapping: ``("modes", "flat, ghost")``."""
    values: dict[str, Any]

    def statements(self) -> Iterator[tuple[tuple[str, ...], Any, int]]:
        """Each value with the keys that lead to it from the mapping, and the number of its line."""
        lines = _lines(self.file, _changed(self.file))
        for keys, value in leaves(self.values):
            yield keys, value, lines.get((*self.trail, *keys), lines.get(self.trail, 1))


class Tables:
    """The tables of one folder of configuration, read when they are asked for."""

    def __init__(self, conf: Path) -> None:
        self._conf = conf

    def part(self, path: str) -> Part | None:
        """The part of that name (see above); None where the tables have none.

        Raises:
            UserError: its file is no YAML, or says something that is no mode, no scale or no key.
        """
        match path.removesuffix(".yaml").split("/"):
            case ["scale", scale] if scale in SCALES:
                return Part(self._conf / "config.yaml", (), {"scale": scale})
            case ["family", family]:
                return self._mapping("recipe", family)
            case ["recipe", family, mode]:
                return self._row("recipe", family, (), mode)
            case ["scales", family, scale]:
                return self._mapping("scales", family, scale)
            case ["exceptions", family, scale, mode]:
                return self._row("scales", family, (scale,), mode)
            case ["model", "default", family, scale]:
                entry = self._table("scales", family).get(scale) or {}
                if DEFAULT_MODEL in entry:
                    defaults = {"defaults": [f"/model/{entry[DEFAULT_MODEL]}@_here_"]}
                    return Part(self._file("scales", family), (scale, DEFAULT_MODEL), defaults)
        return None

    def parts(self, group: str) -> list[str]:
        """The last names of the parts in ``group``, such as ``recipe/cifar``; empty where it is none."""
        match group.split("/"):
            case ["scale"]:
                return sorted(SCALES)
            case ["family"]:
                return sorted(file.stem for file in (self._conf / "recipe").glob("*.yaml"))
            case ["recipe", family]:
                return sorted(mode for row in self._table("recipe", family).get(MODES, {}) for mode in _names(row))
            case ["scales", family]:
                return sorted(self._table("scales", family))
            case ["model", "default", family]:
                table = self._table("scales", family)
                return sorted(scale for scale, entry in table.items() if DEFAULT_MODEL in entry)
            case ["exceptions", family, scale]:
                rows = self._table("scales", family).get(scale, {}).get(MODES, {})
                return sorted(mode for row in rows for mode in _names(row))
        return []

    def _mapping(self, folder: str, family: str, *trail: str) -> Part | None:
        values = self._table(folder, family)
        if not values or not all(key in values for key in trail):
            return None
        for key in trail:
            values = values[key]
        own = {key: value for key, value in values.items() if key not in (MODES, DEFAULT_MODEL)}
        return Part(self._file(folder, family), trail, own)

    def _row(self, folder: str, family: str, trail: tuple[str, ...], mode: str) -> Part | None:
        values = self._table(folder, family)
        for key in trail:
            values = values.get(key) or {}
        for row, own in values.get(MODES, {}).items():
            if mode in _names(row):
                return Part(self._file(folder, family), (*trail, MODES, row), own)
        return None

    def _file(self, folder: str, family: str) -> Path:
        return self._conf / folder / f"{family}.yaml"

    def _table(self, folder: str, family: str) -> dict[str, Any]:
        file = self._file(folder, family)
        if not file.is_file():
            return {}
        return _read(file, _changed(file), folder == "scales", self._options("clip"), self._options("model"))

    def _options(self, group: str) -> frozenset[str]:
        return frozenset(file.stem for file in (self._conf / group).glob("*.yaml"))


def file_part(conf: Path, path: str) -> Part:
    """A whole file of `conf/`, such as ``clip/flat``, without its defaults list; raises `UserError` for no YAML."""
    file = conf / f"{path}.yaml"
    return Part(file, (), {key: value for key, value in _load(file, _changed(file)).items() if key != "defaults"})


def leaves(values: Mapping[str, Any], trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that is no mapping, or an empty one, with the keys that lead to it."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*trail, str(key)))
        else:
            yield (*trail, str(key)), value


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns


@lru_cache(maxsize=256)
def _lines(file: Path, _state: int) -> dict[tuple[str, ...], int]:
    """Keys that lead to a place in a file -> the number of its line."""
    found: dict[tuple[str, ...], int] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), yaml.compose(file.read_text(encoding="utf-8")))]
    for trail, node in waiting:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            found[*trail, key.value] = key.start_mark.line + 1
            waiting.append(((*trail, key.value), value))
    return found


@lru_cache(maxsize=64)
def _read(file: Path, _state: int, by_scale: bool, modes: frozenset[str], models: frozenset[str]) -> dict[str, Any]:
    """A table, checked; once for each state of its file."""
    table = _load(file, _state)
    for complaint, keys in _complaints(table, by_scale, modes, models):
        raise UserError(f"{_shown(file)}:{_lines(file, _state).get(keys, 1)}: {complaint}.")
    return table


@lru_cache(maxsize=256)
def _load(file: Path, _state: int) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file))  # numbers as Hydra reads them: 1e-4 is one
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{_shown(file)} cannot be read ({reason(error)}): mend or restore it.") from error
    return {str(key): value for key, value in loaded.items()} if isinstance(loaded, Mapping) else {}


def _shown(file: Path) -> str:
    return "/".join(file.parts[-3:])


def _names(row: str) -> list[str]:
    return [name.strip() for name in str(row).split(",")]


def _complaints(
    table: Any, by_scale: bool, modes: frozenset[str], models: frozenset[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is wrong, and the keys that lead to it."""
    if not by_scale:
        yield from _values(table, (), modes, also=(MODES,))
        return
    for scale, entry in table.items():
        if scale not in SCALES:
            yield f"{scale} is no scale, one of {', '.join(SCALES)} was expected{did_you_mean(scale, SCALES)}", (scale,)
        yield from _values(entry, (scale,), modes, also=(MODES, DEFAULT_MODEL))
        model = entry.get(DEFAULT_MODEL)
        if model is not None and model not in models:
            hint = did_you_mean(str(model), models)
            yield f"{model} is no model, a file of conf/model/ was expected{hint}", (scale, DEFAULT_MODEL)


def _values(
    values: Any, trail: tuple[str, ...], modes: frozenset[str], also: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not isinstance(values, Mapping):
        yield f"{trail[-1]} is {values}, where settings were expected", trail
        return
    yield from _unknown_keys({key: value for key, value in values.items() if key not in also}, trail)
    seen: set[str] = set()
    rows = values.get(MODES, {})
    if not isinstance(rows, Mapping):
        yield f"modes is {rows}, where a row for each mode was expected", (*trail, MODES)
        return
    for row, own in rows.items():
        here = (*trail, MODES, row)
        for name in _names(row):
            if name not in modes:
                yield f"{name} is no clipping mode, a file of conf/clip/ was expected{did_you_mean(name, modes)}", here
            if name in seen:
                yield f"{name} has two rows, where one was expected: put them together", here
            seen.add(name)
        yield from _values(own, here, modes, also=())


def _unknown_keys(
    values: Mapping[str, Any], trail: tuple[str, ...], prefix: str = ""
) -> Iterator[tuple[str, tuple[str, ...]]]:
    known = key_types()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in known and not key.startswith(FREE_KEYS):
            yield f"there is no key {key}{did_you_mean(key, known)}", (*trail, name)
        elif is_dataclass(known.get(key)) and not isinstance(value, Mapping):
            yield f"the section {key} holds {value}, where its keys were expected", (*trail, name)
        elif isinstance(value, Mapping):
            yield from _unknown_keys(value, (*trail, name), f"{key}.")
