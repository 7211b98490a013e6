"""Prepares a sweep: all cells are composed and checked before the first one starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from groupwise.checkout import CONF
from groupwise.config.checks import refuse_unused
from groupwise.config.compose import Compositions, compositions_of, parse, refuse_taken_name, register, to_run_config
from groupwise.config.identity import config_hash
from groupwise.config.schema import RunConfig
from groupwise.config.sentences import COMPOSITION_ERRORS, in_one_sentence
from groupwise.errors import UserError
from groupwise.sweeps.cells import expand, read_sweep, text


@dataclass(frozen=True)
class PlannedCell:
    """A checked run of a sweep."""

    name: str
    """Settings and seed; for a sweep without a file, the overrides in which cells differ."""
    seed: int
    overrides: tuple[str, ...]
    """Its overrides for `run.py`."""
    config: RunConfig
    hash: str

    @property
    def cell(self) -> str:
        """The name without the seed."""
        return " ".join(word for word in self.name.split() if not word.startswith("seed="))

    @property
    def run(self) -> Path:
        """The folder of its record."""
        return Path(self.config.paths.results).expanduser() / "runs" / self.hash[:12]

    @property
    def done(self) -> bool:
        """Whether its run is finished."""
        return (self.run / "DONE").is_file() and not (self.config.overwrite or self.config.explain)


@dataclass(frozen=True)
class PlannedSweep:
    """A checked sweep."""

    name: str
    """The name of the file in `sweeps/`; "cells" for a sweep without a file."""
    scale: str
    folder: Path
    """The folder of its record."""
    cells: tuple[PlannedCell, ...] | None
    """None if a sweeper such as Optuna chooses the cells while it runs."""
    hydra: DictConfig
    """Hydra's own settings, which all cells share."""


def plan_sweep(overrides: Sequence[str], conf: Path) -> PlannedSweep:
    """Compose and validate every cell of ``-m OVERRIDES...``; nothing is written.

    Raises:
        UserError: a cell is refused, which the error names, or an override has no effect in any cell.
    """
    cells = None
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        given = parse(overrides)
        shared = [str(item.input_line) for item in given if not item.is_sweep_override()]
        whole = compose("config", shared, return_hydra_config=True)
        sweeper = whole.hydra.sweeper
        chosen = whole.hydra.runtime.choices.get("sweep")
        named = [item for item in given if item.key_or_group == "sweep"]
        if any(item.is_sweep_override() or isinstance(item.value(), list) for item in named):
            raise UserError("+sweep= names several sweeps: give one sweep at a time.")
        if chosen and not whole.sweep.grids and not sweeper.get("params"):
            raise UserError(f"the sweep {chosen} has no grids: list the values of each key under grids in its file.")
        name = str(chosen or "cells")
        folder = Path(OmegaConf.select(whole, "hydra.sweep.dir")).expanduser()
        places = [word for word in shared if word.startswith("hydra.searchpath")]
        if sweeper._target_.endswith("BasicSweeper"):
            of_grids = bool(whole.sweep.grids)
            words = _of_grids(whole.sweep, given, whole.scale) if of_grids else _of_command_line(sweeper, given, shared)
            compositions = Compositions(places)
            cells = tuple(_checked(compositions, *cell) for cell in words)
            refuse_unused([] if of_grids else overrides, *(cell.config for cell in cells))
    exports = [cell.config.export for cell in cells or () if cell.config.export is not None]
    if len(set(exports)) < len(exports):
        raise UserError(f"export={exports[0]} names one folder for several cells: give export=FOLDER/${{seed}}, say.")
    return PlannedSweep(name, str(whole.scale), folder, cells, whole.hydra)


def table_cells(name: str, scale: str, conf: Path = CONF) -> list[PlannedCell]:
    """All cells of a file of `sweeps/`: those that ``-m +sweep=<name> scale=<scale>`` runs.

    `name` may be the path of another file: ``my/sweep/<name>.yaml`` for ``--config-dir my``. Raises `UserError` as
    `read_sweep`, `plan_sweep` and `refuse_taken_name` do.
    """
    register()
    path = Path(name) if name.endswith(".yaml") else conf / "sweep" / f"{name}.yaml"
    sweep, places = read_sweep(path), [f"hydra.searchpath=['file://{path.resolve().parent.parent}']"]
    refuse_taken_name(path, conf / "sweep" / path.name)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        compositions = Compositions(places) if name.endswith(".yaml") else compositions_of(conf)
        return [_checked(compositions, f"{cell.name} seed={cell.seed}", cell.overrides) for cell in sweep.cells(scale)]


def _of_grids(sweep: DictConfig, given: Sequence[Any], scale: str) -> Iterator[tuple[str, list[str]]]:
    """Name and overrides of each cell of a table; the command line selects values, or changes all cells."""
    grids: list[dict[str, Any]] = OmegaConf.to_container(sweep.grids, resolve=True)  # type: ignore[assignment]
    scales: dict[str, Any] = OmegaConf.to_container(sweep.scales, resolve=True)  # type: ignore[assignment]
    keys = {key for grid in grids for key in grid} | {"seed"}
    chosen: dict[str, list[str]] = {}
    rest: dict[str, list[str]] = {}
    for item in given:
        key, values = item.key_or_group, _values(item)
        if item.is_hydra_override() or key in ("scale", "sweep") or key.startswith("sweep."):
            continue
        if key in keys:
            chosen[key] = values
        elif len(values) > 1:
            rest[key] = [f"{item.get_key_element()}={value}" for value in values]
        else:
            rest[key] = [str(item.input_line)]
    scales_wanted = next((_values(item) for item in given if item.key_or_group == "scale"), [scale])
    for each in scales_wanted:
        for cell in expand(grids, scales, each, chosen):
            kept = [part for part in cell.overrides if part.split("=", 1)[0] not in rest]
            for words in product(*rest.values()):
                named = [word for word, each in zip(words, rest.values(), strict=True) if len(each) > 1]
                name = " ".join(sorted([*cell.name.split(), *named], key=lambda word: word.partition("=")[0]))
                yield f"{name} seed={cell.seed}", [*kept, *words]


def _of_command_line(
    sweeper: DictConfig, given: Sequence[Any], shared: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """All combinations, as in Hydra's basic sweeper. A cell's name has the overrides that differ between cells."""
    items = parse([f"{key}={values}" for key, values in (sweeper.params or {}).items()])
    items += [item for item in given if not item.is_hydra_override()]
    values: dict[str, list[str]] = {}
    for item in items:
        if item.is_sweep_override() and not item.is_discrete_sweep():
            raise UserError(f"{item.input_line} is not a finite list: list the values, or give hydra/sweeper=optuna.")
        several = item.sweep_string_iterator() if item.is_sweep_override() else [item.get_value_element_as_str()]
        values[item.get_key_element()] = [f"{item.get_key_element()}={value}" for value in several]
    for cell in map(list, product(*values.values())):
        yield " ".join(part for part in cell if part not in shared) or " ".join(cell), cell


def _values(item: Any) -> list[str]:
    """The values of an override, written as in a grid: 3.0 is 3."""
    several = item.sweep_string_iterator() if item.is_sweep_override() else [item.get_value_element_as_str()]
    return [text(_number(value)) for value in several]


def _number(value: str) -> Any:
    try:
        return float(value) if not value.isdecimal() else value
    except ValueError:
        return value


def _checked(compositions: Compositions, name: str, arguments: Sequence[str]) -> PlannedCell:
    try:
        config = to_run_config(compositions.compose(arguments))
    except (*COMPOSITION_ERRORS, ValueError) as error:  # Hydra's error for clip=null is a ValueError
        raise UserError(f"in the cell {name}: {in_one_sentence(error)}") from error
    return PlannedCell(name, config.seed, tuple(arguments), config, config_hash(config))
