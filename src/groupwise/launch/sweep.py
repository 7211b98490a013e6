"""A sweep is checked whole, cell by cell, before its first cell starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from groupwise.errors import UserError
from groupwise.launch.compose import to_run_config
from groupwise.launch.mistakes import COMPOSITION_ERRORS, in_one_sentence


def check_sweep(overrides: Sequence[str], conf: Path) -> int:
    """Compose and validate every cell of ``-m OVERRIDES...``, nothing else; returns their number.

    A sweep that another sweeper than Hydra's basic one expands is not known beforehand: 0. Raises `UserError`
    naming the cell, or the composition error of the part that all cells share.
    """
    from hydra import compose, initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    shared = [text for text in overrides if not parser.parse_override(text).is_sweep_override()]
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        sweeper = compose("config", shared, return_hydra_config=True).hydra.sweeper
        if not sweeper._target_.endswith("BasicSweeper"):
            return 0
        swept = [f"{key}={values}" for key, values in (sweeper.params or {}).items()]
        batches = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *overrides]), None)
        cells = [cell for batch in batches for cell in batch]
        for cell in cells:
            try:
                to_run_config(compose("config", cell))
            except COMPOSITION_ERRORS as error:
                changed = [part for part in cell if part not in shared]
                raise UserError(f"in the cell {' '.join(changed)}: {in_one_sentence(error)}") from error
    return len(cells)
