"""Options of the SLURM launcher reach the batch script; stubs replace the programs of SLURM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "sbatch": 'cp "$1" "$SCRIPTS/$$.sh"; echo "Submitted batch job 7"',
    "srun": "exit 0",
    "squeue": "exit 0",
    "sacct": 'printf "JobID|State|NodeList\\n7_[0-2]|CANCELLED|\\n"',
}
CELLS = ["task=cifar", "scale=smoke", "clip=flat", "seed=0,1,2", "parallel.ranks=4"]
GIVEN = {
    "hydra.launcher.account=ours": "#SBATCH --account=ours",
    "hydra.launcher.partition=gpu": "#SBATCH --partition=gpu",
    "hydra.launcher.qos=long": "#SBATCH --qos=long",
    "hydra.launcher.constraint=a100": "#SBATCH --constraint=a100",
    "hydra.launcher.exclude=node7": "#SBATCH --exclude=node7",
    "hydra.launcher.gpus_per_task=1": "#SBATCH --gpus-per-task=1",
    "hydra.launcher.cpus_per_task=8": "#SBATCH --cpus-per-task=8",
    "hydra.launcher.mem_gb=64": "#SBATCH --mem=64GB",
    "hydra.launcher.timeout_min=600": "#SBATCH --time=600",
    "hydra.launcher.signal_delay_s=300": "#SBATCH --signal=USR2@300",
    "+hydra.launcher.additional_parameters={nice: 100}": "#SBATCH --nice=100",
    'hydra.launcher.setup=["module load cuda"]': "\nmodule load cuda\n",
    '+hydra.launcher.srun_args=["--container-image=/images/ours.sqsh"]': " --container-image=/images/ours.sqsh ",
    "hydra.launcher.array_parallelism=1": "#SBATCH --array=0-2%1",
    "hydra.launcher.tasks_per_node=2": "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2",
    "hydra.launcher.stderr_to_stdout=true": f" {sys.executable} -u -m submitit.core._submit ",
}
"""Argument -> its text in the batch script."""


@pytest.mark.slow
def test_documented_options_reach_the_batch_script(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "SCRIPTS": str(tmp_path / "scripts"),
    }
    command = [sys.executable, str(ROOT / "run.py"), "-m", *CELLS, "hydra/launcher=slurm", *GIVEN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "3 jobs ended without a result" in done.stderr, done.stderr  # the stubs run nothing
    [script] = [file.read_text() for file in (tmp_path / "scripts").iterdir()]
    for argument, line in GIVEN.items():
        assert line in script, f"{argument}\n{script}"
        name = argument.lstrip("+").partition("=")[0].rpartition(".")[2]
        assert name in page or name == "stderr_to_stdout", argument
    assert "max_num_timeout" in page
