"""Runs the cells of a sweep's folder through Hydra: its basic sweeper over ``cell=…``, and the launcher given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from groupwise.config.identity import load_config
from groupwise.errors import ProcessFailed
from groupwise.processes.environment import world_size
from groupwise.sweeps import slurm
from groupwise.sweeps.folder import cell_file, read_cells, unfinished

Cells = list[dict[str, Any]]
"""Of `cells.json`."""


def run_cells(folder: Path, launcher: DictConfig, multirun: Callable[[Sequence[str]], None]) -> None:
    """Run the cells that are not done, those with the same number of processes together; failures go to the folder.

    Args:
        launcher: Hydra's settings of it. multirun: runs ``-m`` with these words.
    """
    waiting = [cell for cell in read_cells(folder) if not cell["done_before"]]
    by_processes: dict[int, Cells] = {}
    for cell in waiting:
        by_processes.setdefault(world_size(load_config(cell_file(folder, cell["hash"][:12]))), []).append(cell)
    for processes, cells in by_processes.items():
        words: list[str] = []
        if launcher._target_.endswith(slurm.LAUNCHER):
            words = slurm.job_words(launcher, processes)
            tasks = f"cells: {len(cells)}, tasks of each: {processes}"
            print(f"Submitting jobs ({tasks}); logs: {folder / 'logs'}", file=sys.stderr, flush=True)
        try:
            _run(folder, cells, lambda hashes, words=words: multirun([*words, f"cell={hashes}"]))  # type: ignore[misc]
        except Exception as error:
            if not type(error).__module__.startswith("submitit."):
                raise
            slurm.wait_for_the_others(error, folder)
            if lost := [cell for cell in unfinished(folder) if cell in cells]:
                raise ProcessFailed(f"{len(lost)} jobs ended without a result: see {folder / 'logs'}") from error


def _run(folder: Path, cells: Cells, launch: Callable[[str], None]) -> None:
    """Pass the cells to the launcher. A killed cell also ends joblib's other workers: their cells start again."""
    before: tuple[int, int] | None = None
    while True:
        try:
            return launch(",".join(f"'{cell['hash'][:12]}'" for cell in cells))
        except BrokenProcessPool as error:
            left = [cell for cell in unfinished(folder) if cell in cells]
            waiting = [cell for cell in left if not (folder / "logs" / f"{cell['hash'][:12]}.log").is_file()]
            now = len(waiting), len(left)
            if now == before or not left:
                raise
            print(f"a cell was killed ({type(error).__name__}); going on with {len(left)}", file=sys.stderr)
            cells, before = waiting + [cell for cell in left if cell not in waiting], now
