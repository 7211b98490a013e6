"""An exported folder contains nothing that depends on the training data without noise."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig
from groupwise.rows import row_of_data
from groupwise.run import run
from tests.checked import checked_once

ROOT = Path(__file__).resolve().parents[2]
PLAN = {
    "dataset_size", "expected_batch_size", "steps", "epsilon", "delta", "num_groups", "quantile_budget",
    "noise_multiplier", "count_noise_multiplier", "gradient_noise_multiplier", "adjacency", "sampling", "accountant",
    "note", "private", "neighbours_differ_by", "earlier",
}  # fmt: skip
TOP = {"sha256", "hash", "config", "git", "privacy", "metrics"}
COMMON = [f"a{'n entirely' if i % 3 else ''} {'fine' if i % 2 else 'dull'} film number {i}\t{i % 2}" for i in range(40)]
SHORT, LONG = "so\t0", " ".join(f"one {i} more" for i in range(60)) + "\t1"


def exported(folder: Path, own: str, *overrides: str):
    """Train privately on `COMMON` and the row `own`; return the exported folder, the row of results and the config."""
    files = folder / "data" / "glue" / "SST-2"
    files.mkdir(parents=True)
    for name, rows in (("train", [own, *COMMON]), ("dev", COMMON[:8])):
        (files / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    config = compose_run(
        ["task=sst2", "scale=smoke", "clip=fixed_layer", "data.name=files", f"paths.data={folder / 'data'}",
         f"paths.results={folder / 'results'}", f"export={folder / 'out'}", "debug.noise_seed=3", "optim=sgd",
         "train.steps=2", "privacy.accountant=rdp", "model.pool=first", *overrides],
        ROOT / "conf",
    )  # fmt: skip
    with checked_once(config.clip.name):
        row = run(config)
    return folder / "out", row, config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Export = tuple[Path, dict[str, Any], RunConfig]


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory) -> Callable[..., tuple[Export, Export]]:
    """Exports of runs on two neighbouring data sets; no step moves the weights, so both release the same."""

    @cache
    def train(*more: str) -> tuple[Export, Export]:
        folder = tmp_path_factory.mktemp("neighbours")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
            return exported(folder / "one", SHORT, *more), exported(folder / "other", LONG, *more)

    return train


@pytest.mark.parametrize("more", [(), ("data.holdout=0.2",)])
def test_with_equal_releases_two_neighbours_export_the_same_bytes(neighbours, more):
    """One data set has a short example where the other has a long one. So the SHA-256 of the data, the longest example,
    the number of truncated ones, the training metrics and the batches differ."""
    (one, row, config), (other, another, _) = neighbours(*more)
    differ = {key for key in row if row[key] != another[key]}
    assert {"nonprivate/train_loss", "nonprivate/data.longest", "nonprivate/data.cut_examples"} <= differ or more
    assert contents(one) == contents(other)

    saved = json.loads((one / "provenance.json").read_text())
    assert set(saved) == TOP and set(saved["git"]) == {"sha", "dirty"} and set(saved["privacy"]) == PLAN
    assert saved["config"] == json.loads(json.dumps(stable_config(config)))
    assert saved["privacy"]["private"] is False, "the noise was seeded"
    assert list(saved["sha256"]) == ["model.safetensors"]
    choice = "data.holdout=0.2 and data.train_limit=64" if more else "data.train_limit=64"
    assert saved["privacy"]["neighbours_differ_by"] == f"one of the N examples that {choice} left to train on"
    assert row["plan.neighbours_differ_by"] == saved["privacy"]["neighbours_differ_by"]
    held_out = set() if more else {"valid/accuracy", "valid/loss"}
    assert set(saved["metrics"]) == held_out


def test_results_that_depend_on_the_data_without_noise_are_named_nonprivate(neighbours):
    """Measurements of the machine, in `system.`, may differ too: docs/privacy.md explains why."""
    (_, row, _), (_, another, _) = neighbours()
    differ = {key for key in row | another if row.get(key) != another.get(key)}
    own = {"finished_at", "paths.data", "paths.results"}
    assert all(key.startswith(("nonprivate/", "system.")) for key in differ - own), differ


def test_an_export_without_noise_describes_its_data(tmp_path):
    out, _, _ = exported(tmp_path, SHORT, "clip=none")
    saved = json.loads((out / "provenance.json").read_text())
    assert set(saved) == {*TOP, "data"} and saved["data"]["sha256"] and "nonprivate/train_loss" in saved["metrics"]
    assert saved["privacy"]["epsilon"] == "inf" and saved["privacy"]["private"] is False


def test_unknown_fields_of_a_data_description_are_named_nonprivate():
    described = {"train_examples": 3, "longest": 9, "sha256": {"x": "0"}, "source": "40 rows", "mean_length": 2.5}
    assert set(row_of_data(described)) == {
        "data.train_examples", "nonprivate/data.longest", "nonprivate/data.sha256", "nonprivate/data.source",
        "nonprivate/data.mean_length",
    }  # fmt: skip
