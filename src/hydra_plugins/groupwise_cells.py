"""Hydra's side of a sweep: what `groupwise.cli` has planned and checked, through the launcher that was chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class CellsSweeper(BasicSweeper):
    """Runs what `cells.json` in the sweep's folder lists and is not done; without that file, Hydra's basic sweeper."""

    def __init__(
        self,
        grids: Sequence[Mapping[str, Any]] = (),
        scales: Mapping[str, Any] | None = None,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.grids, self.scales = grids, scales or {}

    def sweep(self, arguments: list[str]) -> Any:
        from groupwise.sweeps.folder import CELLS, read_cells

        assert self.config is not None and self.launcher is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        if not (folder / CELLS).is_file():
            return super().sweep(arguments)
        waiting = [cell for cell in read_cells(folder) if not cell["done_before"]]
        size = self.max_batch_size or max(1, len(waiting))
        returns = []
        for first in range(0, len(waiting), size):
            returns.append(self._launch(waiting[first : first + size], first, folder))
        return returns  # a cell that failed has said so in the folder

    def _launch(self, cells: list[dict[str, Any]], first: int, folder: Path) -> Any:
        """Hand them to the launcher. A killed cell takes joblib's other workers along: those go on in new ones."""
        from groupwise.sweeps.folder import has_begun, unfinished

        assert self.launcher is not None
        before: tuple[int, int] | None = None
        while True:
            try:
                return self.launcher.launch([list(cell["overrides"]) for cell in cells], initial_job_idx=first)
            except BrokenProcessPool as error:
                left = [cell for cell in unfinished(folder) if cell in cells]
                waiting = [cell for cell in left if not has_begun(folder, cell)]
                now = len(waiting), len(left)
                if now == before or not left:
                    raise
                print(f"a cell was killed ({type(error).__name__}); going on with {len(left)}", file=sys.stderr)
                cells, before = waiting + [cell for cell in left if cell not in waiting], now
