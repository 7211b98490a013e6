"""Made-up rows of the figures' and some tables' sweeps, in a folder as results/measured is."""

import hashlib
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from groupwise.analysis.results import Folders

PROVENANCE = {"git.sha": "0123456789abcdef0123456789abcdef01234567", "git.dirty": False}
ROOT = Path(__file__).resolve().parents[3]
MODES = {"flat": 48.0, "fixed_layer": 43.0, "adaptive_layer": 47.0}


def cell_of(settings: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(settings.items()))


def identity(sweep: str, settings: dict[str, object], seed: int, scale: str) -> dict[str, object]:
    cell = cell_of(settings)
    digest = hashlib.sha256(f"{sweep} {cell} {seed} {scale}".encode()).hexdigest()
    return {"sweep": sweep, "cell": cell, "seed": seed, "scale": scale, "hash": digest} | PROVENANCE


def write_all(folder: Path, scale: str = "mini", layers: int = 12) -> Path:
    """Rows for every figure that has a sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows: dict[str, list[dict[str, object]]] = {}

    def row(sweep: str, settings: dict[str, object], seed: int, **numbers: object) -> None:
        rows.setdefault(f"{sweep}_{scale}", []).append(identity(sweep, settings, seed, scale) | numbers)

    def accuracy(mean: float) -> float:
        return round(mean + float(random.normal(0, 0.4)), 2)

    for (clip, mean), seed in product(MODES.items(), range(3)):
        for epsilon, loss in ((3, 2.0), (8, 0.0)):
            settings = {"task": "cifar", "clip": clip, "privacy.epsilon": epsilon}
            row("adaptive_vs_fixed", settings, seed, **{"valid/accuracy": accuracy(mean - loss)})
        settings = {"task": "cifar", "clip": clip, "privacy": "noiseless"}
        row("adaptive_vs_fixed", settings, seed, **{"valid/accuracy": accuracy(mean + 1)})
    grids = {"cifar": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "sst2": (0.05, 0.2, 0.4, 0.6, 0.85, 0.9, 0.95)}
    for task, quantiles in grids.items():
        for quantile, epsilon, seed in product(quantiles, (3, 8), range(3)):
            settings = {"task": task, "clip": "adaptive_layer", "privacy.epsilon": epsilon}
            settings |= {"clip.target_quantile": quantile} | ({"model": "roberta_base"} if task == "sst2" else {})
            mean = 46 - 10 * (quantile - 0.6) ** 2 + epsilon / 8
            row("target_quantile", settings, seed, **{"valid/accuracy": accuracy(mean)})
    for budget, epsilon, seed in product((0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.8), (3, 8), range(3)):
        settings = {"task": "sst2", "model": "roberta_base", "clip": "adaptive_layer", "privacy.epsilon": epsilon}
        settings |= {"clip.quantile_budget": budget}
        row("quantile_budget", settings, seed, **{"valid/accuracy": accuracy(80 - 5 * budget + epsilon / 8)})
    speed = {"adaptive_layer": 1.0, "ghost": 1.6, "flat": 1.4}
    for sweep, (clip, slow), seed in product(("runtime_nll", "runtime_metrics"), speed.items(), range(3)):
        settings = {"task": "e2e", "model": "gpt2", "clip": clip, "privacy.epsilon": 8, "eval.curve": "true"}
        row(sweep, settings, seed, **{"test/nll": 2.0, "test/bleu": 20.0, "test/rougeL": 30.0})
        for step in range(10, 60, 10):
            curve = {
                "step": step,
                "seconds": 12.0 * slow * step + seed,
                "test/nll": 2 + 3 * np.exp(-step / 20) + float(random.normal(0, 0.03)),
                "test/bleu": 20 - 15 * np.exp(-step / 20) + float(random.normal(0, 0.5)),
                "test/rougeL": 33 - 15 * np.exp(-step / 20) + float(random.normal(0, 0.5)),
            }
            found = {key: value for key, value in identity(sweep, settings, seed, scale).items() if "git" not in key}
            rows.setdefault(f"{sweep}_{scale}_curves", []).append(found | curve)
    names = {
        "gradnorm_cifar": [f"block{place}.conv" for place in range(layers)],
        "gradnorm_sst2": [
            "roberta.embeddings.word_embeddings",
            *(f"roberta.encoder.layer.{place}.attention.self.value" for place in range(4)),
            "classifier.out_proj",
        ],
    }
    for (sweep, layer_names), examples in zip(names.items(), (32, 100), strict=True):
        task = sweep.removeprefix("gradnorm_")
        settings = {"task": task, "clip": "adaptive_layer", "privacy.epsilon": 8, "train.keep": "[0,1,3,6]"}
        row(sweep, settings, 0, **{"valid/accuracy": 50.0})
        for epoch in (0, 1, 3, 6):
            for place, name in enumerate(layer_names):
                size = 0.2 * (1 + epoch * (len(layer_names) - place) / len(layer_names))
                norms = size * random.lognormal(0, 0.3 + 0.1 * epoch, examples)
                found = {k: v for k, v in identity(sweep, settings, 0, scale).items() if "git" not in k}
                rows.setdefault(f"{sweep}_{scale}_norms", []).extend(
                    found | {"epoch": epoch, "step": 50 * epoch, "layer": place, "name": name, "example": e, "norm": n}
                    for e, n in enumerate(norms)
                )
    for name, listed in rows.items():
        pd.DataFrame(listed).to_csv(folder / f"{name}.csv", index=False)
    return folder


def write_sweeps(folder: Path, measured: Path, scale: str = "mini") -> Path:
    """For each file of rows the sweep that has just these cells."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(measured.glob(f"*_{scale}.csv")):
        cells = pd.read_csv(path)[["cell", "seed"]]
        grids: list[dict[str, object]] = []
        for cell, rows in cells.groupby("cell", sort=False):
            grid: dict[str, object] = dict(item.split("=", 1) for item in str(cell).split())
            grids.append(grid | {"seed": sorted(int(seed) for seed in rows["seed"])})
        name = path.stem.removesuffix(f"_{scale}")
        content = {"grids": grids, "scales": {"mini": {}, "demo": {}}}
        (folder / f"{name}.yaml").write_text("# Made up\n" + yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="session")
def made_up(tmp_path_factory) -> Path:
    """A folder with `measured` and `sweeps`; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("made_up")
    write_sweeps(folder / "sweeps", write_all(folder / "measured"))
    return folder


@pytest.fixture
def folders(tmp_path: Path, made_up: Path) -> Folders:
    """Rows of every figure's sweep at scale=mini, and the sweeps; the paper's numbers are the real ones."""
    results = tmp_path / "results"
    for name in ("measured", "sweeps"):
        shutil.copytree(made_up / name, results / name)
    return Folders(ROOT / "results" / "paper", results / "measured", results / "sweeps")
