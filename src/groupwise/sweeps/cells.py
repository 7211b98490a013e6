"""Lists the cells of a sweep: the runs of a table or figure, at the paper's scale or a smaller one.

The launcher and the tables read `sweeps/<name>.yaml`:

    grids:                         # the paper's cells: all combinations of each grid
      - {task: cifar, clip: [flat, fixed_layer], privacy.epsilon: [3, 8], seed: [0, 1, 2]}
    scales:                        # what smaller scales change
      mini:
        train.epochs: {10: 0.2, 30: 0.6}   # the paper's value -> the value at this scale; null leaves the cell out
        eval.every: 0.5                    # for all cells
        task: {dart: {data.max_length: 96}}  # more keys of the cells that have this value
        seed: [0, 1, 2, 3]                 # seeds of all cells, in place of the paper's
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from groupwise.config.schema import SweepConfig
from groupwise.errors import UserError, unknown

PAPER = "paper"
Grid = Mapping[str, Any]
"""A key of the command line -> a value or a list of values."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    """The paper's settings at every scale, sorted, without the seed: ``clip=flat privacy.epsilon=3 task=cifar``."""
    seed: int
    overrides: tuple[str, ...]
    """The overrides for `run.py` at this scale, seed and scale included."""


@dataclass(frozen=True)
class Sweep:
    """A file of `sweeps/`."""

    name: str
    title: str
    """The first comment of the file."""
    grids: tuple[Grid, ...]
    scales: Mapping[str, Mapping[str, Any]]

    def cells(self, scale: str) -> list[Cell]:
        """The cells at that scale, in the order of the file."""
        return expand(self.grids, self.scales, scale)


def scale_of(word: str) -> str:
    """The scale in the word ``scale=NAME`` of a command line; raises `UserError` for any other word."""
    key, _, scale = word.partition("=")
    if key != "scale" or not scale:
        raise UserError(f"{word!r} is not an argument of this command: give scale=NAME or nothing.")
    return scale


def read_sweep(path: Path) -> Sweep:
    """Read a file of `sweeps/`.

    Raises:
        UserError: there is no such file, it has no grids, or they are no list of mappings.
    """
    if not path.is_file() and (known := sorted(file.stem for file in path.parent.glob("*.yaml"))):
        raise unknown("sweep", path.stem, known)
    try:
        heading = path.read_text(encoding="utf-8")
        loaded = OmegaConf.load(path)
        given = {key: value for key in ("grids", "scales") if (value := OmegaConf.select(loaded, key)) is not None}
        content: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(SweepConfig), given))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not a sweep ({str(error).splitlines()[0]}): correct it.") from error
    if not content["grids"]:
        raise UserError(f"{path} has no grids: list the values of each key under grids.")
    comments = [line.lstrip("# ") for line in heading.splitlines() if line.startswith("# ") and "@package" not in line]
    return Sweep(path.stem, comments[0] if comments else path.stem, tuple(content["grids"]), content["scales"])


def expand(
    grids: Sequence[Grid],
    scales: Mapping[str, Mapping[str, Any]],
    scale: str,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> list[Cell]:
    """The cells of all grids, each once, with the changes of `scale`; scale=paper changes nothing.

    `chosen` has the values to keep, by key (see `choose`).

    Raises:
        UserError: a key without values, a seed that is not a whole number, or an unknown scale.
    """
    if scale != PAPER and scale not in scales:
        known = ", ".join([PAPER, *scales])
        raise UserError(f"this sweep has no scale={scale}: choose one of {known}, or add it to its scales.")
    changes = dict(scales.get(scale) or {})
    seeds = {"seed": changes.pop("seed")} if isinstance(changes.get("seed"), list) else {}
    values = [{key: _listed(key, value) for key, value in ({"seed": 0} | dict(grid) | seeds).items()} for grid in grids]
    for key, wanted in (chosen or {}).items():
        values = choose(values, key, wanted)
    cells = dict.fromkeys(cell for grid in values for cell in _cells(grid, changes, scale))
    return list(cells)


def choose(grids: Sequence[Mapping[str, list[str]]], key: str, wanted: Sequence[str]) -> list[dict[str, list[str]]]:
    """The grids with only `wanted` as values of `key`.

    A value that some grid has is a selection: each grid keeps the selected values that it has, and is dropped if it has
    none. A value that no grid has is new: it is added to all grids that are kept.
    """
    known = {value for grid in grids for value in grid.get(key, ())}
    new = [value for value in wanted if value not in known]
    found = []
    for grid in grids:
        kept = [value for value in wanted if value in new or value in grid.get(key, ())]
        if len(kept) > len(new) or len(new) == len(wanted):
            found.append({**grid, key: kept})
    return found


def _cells(grid: Mapping[str, list[str]], changes: Mapping[str, Any], scale: str) -> Iterator[Cell]:
    for combination in product(*grid.values()):
        settings = dict(zip(grid, combination, strict=True))
        seed = settings.pop("seed")
        if not seed.isdecimal():
            raise UserError(f"seed={seed} in a grid of the sweep is not a whole number: correct it.")
        changed = _changed(settings | {"seed": seed}, changes)
        if changed is not None:
            overrides = tuple(f"{key}={value}" for key, value in ({"scale": scale} | changed).items())
            yield Cell(" ".join(f"{key}={settings[key]}" for key in sorted(settings)), int(seed), overrides)


def _changed(settings: dict[str, str], changes: Mapping[str, Any]) -> dict[str, str] | None:
    """The settings at a scale; None if the scale leaves the cell out."""
    found = dict(settings)
    for key, change in changes.items():
        if not isinstance(change, Mapping):
            found[key] = text(change)
        elif key in found:
            by_text = {text(old): new for old, new in change.items()}
            if found[key] in by_text:
                new = by_text[found[key]]
                if new is None:
                    return None
                found |= {k: text(v) for k, v in (new if isinstance(new, Mapping) else {key: new}).items()}
    return found


def _listed(key: str, value: Any) -> list[str]:
    listed = [text(item) for item in (value if isinstance(value, list | tuple) else [value])]
    if not listed:
        raise UserError(f"{key} has no values in a grid of the sweep: give at least one.")
    return listed


def text(value: Any) -> str:
    """A value in the syntax of the command line: true, null, 3, 0.25."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
