"""A real SLURM: cells are stopped in every way there is, all finish, and nothing shows in their results."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.cluster import ROOT, UP, WHY_NOT, Cell, cells_of, finish, slurm, start, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UP, reason=WHY_NOT)]

SLURM = ("hydra/launcher=slurm", "hydra.launcher.timeout_min=60", "hydra.launcher.signal_delay_s=20")
CIFAR = (
    "task=cifar",
    "scale=smoke",
    "clip=flat,adaptive_layer",
    "seed=0,1,2",
    "train.device=cpu",
    "train.batch_size=64",
    "train.steps=400",
    "train.checkpoint_every=2",
)
MIXED = (
    "scale=smoke",
    "+sweep.scales.smoke={}",
    "sweep.grids=[{task: samsum_pipeline, clip: per_device, train.steps: 120}, {task: cifar, clip: ghost}]",
    "train.checkpoint_every=2",
    "eval.generate.limit=2",
)
MACHINE = ("system.", "git.", "finished_at", "paths.", "plan.replayed_steps", "train.checkpoint_every")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Each step's, without the time that it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def same(one: Path, other: Path) -> bool:
    """Are two runs the same to the bit: all that the row says but for the machine, each step's metrics, the weights?"""
    rows = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    rows = [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in rows]
    weights = [torch.load(folder / "model.pt") for folder in (one, other)]
    bits = weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    return rows[0] == rows[1] and metrics(one) == metrics(other) and bits


def replayed(cell: Cell) -> int:
    """Steps that were lost and run again."""
    return json.loads((cell.run / "privacy.json").read_text())["replayed_steps"]


def test_jobs_that_are_warned_or_requeued_go_on_and_end_as_with_the_local_launcher(tmp_path):
    given = [*(word for word in CIFAR if not word.startswith("seed=")), "seed=0,1"]
    sweep = start(tmp_path / "slurm", *given, *SLURM, "hydra.launcher.array_parallelism=2")
    warned, requeued, late, killed = cells = cells_of(tmp_path / "slurm", sweep)

    slurm("scancel", "--signal=USR2", warned.under_way().step)
    slurm("scontrol", "requeue", requeued.under_way().job)
    slurm("scontrol", "update", f"JobId={late.under_way().job}", f"TimeLimit={late.minutes + 1}")
    os.kill(killed.under_way().processes()[0], signal.SIGKILL)
    until(lambda: late.restarts, "its time is over")
    slurm("scontrol", "update", f"JobId={late.job}", "TimeLimit=60")
    _, told = sweep.communicate(timeout=900)

    assert sweep.returncode == 1 and "(cells: 4, processes per cell: 1)" in told and "1 of 4 cells failed" in told, told
    assert [cell.restarts for cell in cells] == [1, 1, 1, 0]
    for cell in (warned, late):
        assert "can resume from its last checkpoint" in cell.log and replayed(cell) == 0, "it saved before it left"
    finish(start(tmp_path / "slurm", *given))  # the killed one resumes
    finish(start(tmp_path / "local", *given))
    for cell in cells:
        assert same(cell.run, tmp_path / "local" / "runs" / cell.hash), cell.hash


def test_a_pipeline_that_is_warned_leaves_as_a_whole_and_goes_on(tmp_path):
    sweep = start(tmp_path / "slurm", *MIXED, *SLURM)
    cell, alone = cells_of(tmp_path / "slurm", sweep)
    processes = cell.under_way(5).processes()
    assert sorted(processes) == [0, 1]
    slurm("scancel", "--signal=USR2", cell.step)
    until(lambda: cell.restarts == 1, "it is put back")
    told = finish(sweep)
    assert not any(Path(f"/proc/{process}").exists() for process in processes.values())
    assert "(cells: 1, processes per cell: 2)" in told and "(cells: 1, processes per cell: 1)" in told
    assert (cell.restarts, alone.restarts) == (1, 0)
    assert not list((tmp_path / "slurm" / "sweeps").glob("*/failed/*"))
    finish(start(tmp_path / "local", *MIXED))
    assert all(same(each.run, tmp_path / "local" / "runs" / each.hash) for each in (cell, alone))


def test_jobs_of_a_lost_node_and_of_a_pushed_out_one_go_on(tmp_path):
    short = [*(word for word in CIFAR if not word.startswith(("clip=", "seed="))), "clip=flat", "seed=0"]
    sweep = start(tmp_path / "slurm", *short, *SLURM)
    (cell,) = cells_of(tmp_path / "slurm", sweep)
    node = cell.under_way().shown["NodeList"]
    cell.lose_node()
    until(lambda: cell.restarts == 1, "SLURM has missed the node")
    slurm(str(ROOT / "scripts" / "slurm" / "up.sh"))
    cell.under_way(cell.steps + 20)
    slots = next(part for part in slurm("scontrol", "show", "node", "-o", node).split() if part.startswith("CPUTot="))
    options = ["--parsable", "--partition=high", f"--ntasks={slots[7:]}", "--output=/dev/null", "--wrap=sleep 3"]
    urgent = slurm("sbatch", *options).strip()
    until(lambda: cell.restarts == 2, "it is pushed out")
    finish(sweep)
    assert "COMPLETED" in slurm("scontrol", "show", "job", urgent)
    finish(start(tmp_path / "local", *short))
    assert same(cell.run, tmp_path / "local" / "runs" / cell.hash)


def test_a_cell_that_fails_and_one_that_is_cancelled_are_told_and_end_no_other(tmp_path):
    given = ["task=cifar", "scale=smoke", "clip=none", "train.device=cpu", "seed=0,1,2", "train.steps=400"]
    sweep = start(tmp_path, *given, "export=model", *SLURM)
    _, told = sweep.communicate(timeout=900)
    assert sweep.returncode == 2 and told.count("UserError") == 3, told

    sweep = start(tmp_path / "other", *given, *SLURM)
    first, second, third = cells_of(tmp_path / "other", sweep)
    slurm("scancel", second.under_way().job)
    _, told = sweep.communicate(timeout=900)
    assert sweep.returncode == 1 and "1 of 3 cells failed" in told, told
    assert (first.run / "DONE").is_file() and (third.run / "DONE").is_file() and not (second.run / "DONE").exists()
