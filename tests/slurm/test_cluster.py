"""On a real SLURM, cells that are stopped, requeued, killed or preempted resume and end with the same bits."""

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
    """The metrics of each step, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same row (apart from the machine), metrics of each step, and weights, to the bit."""
    rows = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    rows = [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in rows]
    weights = [torch.load(folder / "model.pt") for folder in (one, other)]
    bits = weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    return rows[0] == rows[1] and metrics(one) == metrics(other) and bits


def replayed(cell: Cell) -> int:
    """The number of steps that were lost and repeated."""
    return json.loads((cell.run / "privacy.json").read_text())["replayed_steps"]


def test_warned_requeued_and_killed_jobs_end_as_with_the_local_launcher(tmp_path):
    given = [*(word for word in CIFAR if not word.startswith("seed=")), "seed=0,1"]
    sweep = start(tmp_path / "slurm", *given, *SLURM, "hydra.launcher.array_parallelism=2")
    warned, requeued, late, killed = cells = cells_of(tmp_path / "slurm", sweep)

    slurm("scancel", "--signal=USR2", warned.under_way().step)
    slurm("scontrol", "requeue", requeued.under_way().job)
    slurm("scontrol", "update", f"JobId={late.under_way().job}", f"TimeLimit={late.minutes + 1}")
    os.kill(killed.under_way().processes()[0], signal.SIGKILL)
    until(lambda: late.restarts, "the job reaches its time limit")
    slurm("scontrol", "update", f"JobId={late.job}", "TimeLimit=60")
    _, err = sweep.communicate(timeout=900)

    assert sweep.returncode == 1 and "(cells: 4, processes per cell: 1)" in err and "1 of 4 cells failed" in err, err
    assert [cell.restarts for cell in cells] == [1, 1, 1, 0]
    for cell in (warned, late):
        assert "can resume from its last checkpoint" in cell.log and replayed(cell) == 0, "no step was lost"
    finish(start(tmp_path / "slurm", *given))  # resumes the killed cell
    finish(start(tmp_path / "local", *given))
    for cell in cells:
        assert same(cell.run, tmp_path / "local" / "runs" / cell.hash), cell.hash


def test_warned_pipeline_stops_all_processes_and_resumes(tmp_path):
    sweep = start(tmp_path / "slurm", *MIXED, *SLURM)
    cell, alone = cells_of(tmp_path / "slurm", sweep)
    processes = cell.under_way(5).processes()
    assert sorted(processes) == [0, 1]
    slurm("scancel", "--signal=USR2", cell.step)
    until(lambda: cell.restarts == 1, "it is requeued")
    err = finish(sweep)
    assert not any(Path(f"/proc/{process}").exists() for process in processes.values())
    assert "(cells: 1, processes per cell: 2)" in err and "(cells: 1, processes per cell: 1)" in err
    assert (cell.restarts, alone.restarts) == (1, 0)
    assert not list((tmp_path / "slurm" / "sweeps").glob("*/failed/*"))
    finish(start(tmp_path / "local", *MIXED))
    assert all(same(each.run, tmp_path / "local" / "runs" / each.hash) for each in (cell, alone))


def test_jobs_resume_after_a_lost_node_and_a_preemption(tmp_path):
    short = [*(word for word in CIFAR if not word.startswith(("clip=", "seed="))), "clip=flat", "seed=0"]
    sweep = start(tmp_path / "slurm", *short, *SLURM)
    (cell,) = cells_of(tmp_path / "slurm", sweep)
    node = cell.under_way().shown["NodeList"]
    cell.lose_node()
    until(lambda: cell.restarts == 1, "SLURM detects the lost node")
    slurm(str(ROOT / "scripts" / "slurm" / "up.sh"))
    cell.under_way(cell.steps + 20)
    slots = next(part for part in slurm("scontrol", "show", "node", "-o", node).split() if part.startswith("CPUTot="))
    options = ["--parsable", "--partition=high", f"--ntasks={slots[7:]}", "--output=/dev/null", "--wrap=sleep 3"]
    urgent = slurm("sbatch", *options).strip()
    until(lambda: cell.restarts == 2, "it is preempted")
    finish(sweep)
    assert "COMPLETED" in slurm("scontrol", "show", "job", urgent)
    finish(start(tmp_path / "local", *short))
    assert same(cell.run, tmp_path / "local" / "runs" / cell.hash)


def test_failed_and_cancelled_cells_are_reported_and_others_finish(tmp_path):
    given = ["task=cifar", "scale=smoke", "clip=none", "train.device=cpu", "seed=0,1,2", "train.steps=400"]
    sweep = start(tmp_path, *given, "export=model/${seed}", *SLURM)
    _, err = sweep.communicate(timeout=900)
    assert sweep.returncode == 2 and err.count("UserError") == 3, err

    sweep = start(tmp_path / "other", *given, *SLURM)
    first, second, third = cells_of(tmp_path / "other", sweep)
    slurm("scancel", second.under_way().job)
    _, err = sweep.communicate(timeout=900)
    assert sweep.returncode == 1 and "1 of 3 cells failed" in err, err
    assert (first.run / "DONE").is_file() and (third.run / "DONE").is_file() and not (second.run / "DONE").exists()
