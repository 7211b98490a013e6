"""The growth benchmark doubles one size at a time, measures every method there and ends before it takes too long."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from benchmarks import growing, growth
from benchmarks.growing import NETWORKS, Sizes, build
from benchmarks.growth import GrowthOptions
from benchmarks.methods import make

TINY = {"transformer": Sizes(batch=2, length=4, width=8, layers=1), "conv": Sizes(batch=2, length=4, width=4, layers=1)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    small = {name: replace(network, start=TINY[name]) for name, network in NETWORKS.items()}
    for module in (growing, growth):
        monkeypatch.setattr(module, "NETWORKS", small)


@pytest.mark.parametrize("network", TINY)
def test_networks_can_be_clipped_and_each_example_has_its_own_loss(network):
    workload = build(network, TINY[network])
    method = make("adaptive_layer", workload)
    method.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.trainable)
    assert torch.equal(build(network, TINY[network]).loss(), build(network, TINY[network]).loss())
    loss = build(network, TINY[network], dtype="bfloat16").loss()
    assert loss.dtype == torch.float32


@pytest.mark.slow  # real processes
def test_rows(tmp_path):
    command = ["network=transformer", "axis=batch,layers", "method=flat", "doublings=1", "rounds=2", "steps=1"]
    assert growth.main([*command, f"out={tmp_path}"]) == 0
    rows = pd.read_csv(tmp_path / "growth.csv")
    assert len(rows) == 2 * 2 * 2 * 2  # axes, sizes, methods, rounds
    assert set(rows["method"]) == {"none", "flat"} and (rows[["cpu_seconds", "peak_bytes"]] > 0).all(axis=None)
    batch = rows[rows["axis"] == "batch"]
    assert set(batch["batch"]) == {2, 4} and set(batch["layers"]) == {1} and (batch["value"] == batch["batch"]).all()
    again = ["axis=batch" if word.startswith("axis=") else word for word in command]
    assert growth.main([*again, f"out={tmp_path}"]) == 0
    assert len(pd.read_csv(tmp_path / "growth.csv")) == len(rows)


def test_an_axis_ends_before_a_step_takes_too_long(capsys):
    options = GrowthOptions(doublings=3, rounds=1, limit=1e-9)
    assert {row["value"] for row in growth.measure("conv", "batch", ["none"], options)} == {TINY["conv"].batch}
    assert "batch ends here" in capsys.readouterr().err
