"""Runs the cells of a sweep's folder through Hydra: the basic sweeper over ``cell=…``, and the chosen launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from groupwise.config.identity import load_config
from groupwise.errors import ProcessFailed
from groupwise.processes.environment import world_size
from groupwise.sweeps import slurm
from groupwise.sweeps.folder import cell_file, read_cells, unfinished

Cells = list[dict[str, Any]]
"""Entries of `cells.json`."""


def run_cells(folder: Path, launcher: DictConfig, multirun: Callable[[Sequence[str]], None]) -> None:
    """Run the cells that are not done; failures are written to the folder.

    Cells with the same number of processes are launched together.

    Args:
        folder: of the sweep.
        launcher: the settings of Hydra's launcher.
        multirun: runs ``-m`` with the given words.
    """
    waiting = [cell for cell in read_cells(folder) if not cell["done_before"]]
    by_processes: dict[int, Cells] = {}
    for cell in waiting:
        by_processes.setdefault(world_size(load_config(cell_file(folder, cell["hash"][:12]))), []).append(cell)
    for processes, cells in by_processes.items():
        words: list[str] = []
        if launcher._target_.endswith(slurm.LAUNCHER):
            words = slurm.job_words(launcher, processes)
            tasks = f"cells: {len(cells)}, processes per cell: {processes}"
            print(f"Submitting jobs ({tasks}); logs: {folder / 'logs'}", file=sys.stderr, flush=True)
        try:
            hashes = ",".join(f"'{cell['hash'][:12]}'" for cell in cells)
            multirun([*words, f"cell={hashes}"])
        except Exception as error:
            if not type(error).__module__.startswith("submitit."):
                raise
            slurm.wait_for_the_others(error, folder)
            if lost := [cell for cell in unfinished(folder) if cell in cells]:
                raise ProcessFailed(f"{len(lost)} jobs ended without a result: see {folder / 'logs'}") from error
