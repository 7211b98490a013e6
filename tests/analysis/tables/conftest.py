"""A project in a temporary folder: the numbers of the paper, three sweeps, and synthetic rows."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import yaml

from groupwise.analysis.results import Folders, settings_of
from groupwise.sweeps.cells import read_sweep

ROOT = Path(__file__).resolve().parents[3]
EVERYWHERE = {"privacy.epsilon": [3, 8], "seed": [0, 1, 2]}
CLIPS = ["flat", "adaptive_flat", "fixed_layer", "adaptive_layer"]
TASKS = [{"task": "cifar"}, {"task": "sst2", "model": "roberta_base"}]
SWEEPS = {
    "fixed_per_layer": [task | {"clip": ["fixed_layer", "flat"]} for task in TASKS],
    "adaptivity": [task | {"clip": CLIPS} for task in TASKS],
    "glue": [
        {"task": ["mnli", "qqp", "qnli", "sst2"], "model": ["roberta_base", "roberta_large"], "clip": "adaptive_layer"}
    ],
}
MINI = {"model": {"roberta_base": "roberta_mini", "roberta_large": None}, "task": {"mnli": None, "qqp": None}}
BASE = {"flat": 60.0, "adaptive_flat": 60.1, "fixed_layer": 56.0, "adaptive_layer": 60.0}
JITTER = (-0.2, 0.0, 0.2)


def made_up(cell: dict[str, str], seed: int) -> float:
    """Fixed per-layer clipping is four points worse than the other modes; ε = 8 is two points better than 3."""
    wobble = 0.05 * seed * seed if cell["clip"] != "flat" else 0.0
    return BASE[cell["clip"]] + JITTER[seed] + wobble + (2.0 if cell["privacy.epsilon"] == "8" else 0.0)


@dataclass
class World:
    """The folders of the project, and functions that fill them."""

    folders: Folders

    def rows(self, sweep: str, scale: str = "mini", value: Callable[[dict[str, str], int], float] = made_up):
        """A valid row for each cell and seed of the sweep, sorted by both."""
        rows = []
        for cell in read_sweep(self.folders.sweeps / f"{sweep}.yaml").cells(scale):
            rows.append(
                {
                    "sweep": sweep,
                    "cell": cell.name,
                    "seed": cell.seed,
                    "scale": scale,
                    "valid/accuracy": value(settings_of(cell.name), cell.seed),
                    "hash": hashlib.sha256(f"{sweep} {scale} {cell.name} {cell.seed}".encode()).hexdigest(),
                    "git.sha": "0123456789abcdef0123456789abcdef01234567",
                    "git.dirty": False,
                    "plan.private": True,
                    "plan.delta": 1e-05,
                    "plan.noise_multiplier": 1.0,
                    "plan.adjacency": "add_remove",
                    "plan.sampling": "poisson",
                    "plan.accountant": "prv",
                    "system.device": "cpu (made up)",
                    "versions.torch": "2.13.0",
                }
            )
        return pd.DataFrame(rows).sort_values(["cell", "seed"], ignore_index=True)

    def write(self, rows: pd.DataFrame, sweep: str, scale: str = "mini") -> Path:
        path = self.folders.measured / f"{sweep}_{scale}.csv"
        rows.to_csv(path, index=False)
        return path


@pytest.fixture
def world(tmp_path) -> World:
    folders = Folders(ROOT / "results" / "paper", tmp_path / "measured", tmp_path / "sweeps")
    folders.measured.mkdir()
    folders.sweeps.mkdir()
    floors = "task,metric,value\ncifar,valid/accuracy,10.0\nsst2,valid/accuracy,50.9\n"
    (folders.measured / "constant_answers.csv").write_text(floors)
    for name, grids in SWEEPS.items():
        content = {"grids": [grid | EVERYWHERE for grid in grids], "scales": {"mini": MINI}}
        (folders.sweeps / f"{name}.yaml").write_text(f"# Table 0: {name}.\n" + yaml.safe_dump(content, sort_keys=False))
    return World(folders)
