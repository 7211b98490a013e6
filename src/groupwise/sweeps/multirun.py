"""Runs the cells of a sweep's folder through Hydra: the basic sweeper over ``cell=…``, and the chosen launcher."""

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


def run_cells(folder: Path, settings: DictConfig, multirun: Callable[[Sequence[str]], None]) -> None:
    """Run the cells that are not done; failures are written to the folder.

    Cells with the same number of processes are launched together, at most ``hydra.sweeper.max_batch_size`` at once.
    `settings` are Hydra's, with its launcher and sweeper, and `multirun` runs ``-m`` with the given words.

    Raises:
        UserError: processes cannot be split evenly; sbatch refused jobs.
        ProcessFailed: SLURM jobs ended without a result. The other jobs are submitted all the same.
    """
    waiting = [cell for cell in read_cells(folder) if not cell["done_before"]]
    by_processes: dict[int, Cells] = {}
    for cell in waiting:
        by_processes.setdefault(world_size(load_config(cell_file(folder, cell["hash"][:12]))), []).append(cell)
    on_slurm = settings.launcher._target_.endswith(slurm.LAUNCHER)
    words = {n: slurm.job_words(settings.launcher, n) if on_slurm else [] for n in by_processes}
    lost: Cells = []
    for processes, cells in by_processes.items():
        size = settings.sweeper.max_batch_size or len(cells)
        for batch in (cells[start : start + size] for start in range(0, len(cells), size)):
            if on_slurm:
                tasks = f"cells: {len(batch)}, processes per cell: {processes}"
                print(f"Submitting jobs ({tasks}); logs: {folder / 'logs'}", file=sys.stderr, flush=True)
            try:
                hashes = ",".join(f"'{cell['hash'][:12]}'" for cell in batch)
                multirun([*words[processes], f"cell={hashes}"])
            except Exception as error:
                if not type(error).__module__.startswith("submitit."):
                    raise
                slurm.wait_for_the_others(error, folder)
                lost += [cell for cell in unfinished(folder) if cell in batch]
    if lost:
        raise ProcessFailed(f"{len(lost)} jobs ended without a result: see {folder / 'logs'}")
