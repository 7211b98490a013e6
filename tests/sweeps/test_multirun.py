"""Cells are launched in groups and batches, and the end of a SLURM job without a result stops no other."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from groupwise.config.compose import register
from groupwise.errors import ProcessFailed, UserError
from groupwise.sweeps import slurm
from groupwise.sweeps.folder import begin_sweep, report_sweep
from groupwise.sweeps.multirun import run_cells
from groupwise.sweeps.prepare import plan_sweep

CONF = Path(__file__).parents[2] / "conf"
SETTINGS = {
    "launcher": {"_target_": f"hydra_plugins.{slurm.LAUNCHER}", "tasks_per_node": 4},
    "sweeper": {"max_batch_size": None},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a sweep of five cells: three of one process, and two of three."""
    register()
    given = [
        "task=cifar",
        "scale=smoke",
        "clip=flat",
        f"paths.results={tmp_path}",
        "hydra.sweep.dir=${paths.results}/s",
    ]
    one = plan_sweep([*given, "seed=0,1,2"], CONF)
    two = plan_sweep([*given, "seed=0,1", "parallel.ranks=3"], CONF)
    return begin_sweep(type(one)(one.name, one.scale, one.folder, one.cells + two.cells, one.hydra))


@pytest.mark.parametrize(("most", "sizes"), [(None, [3, 2]), (2, [2, 1, 2])])
def test_lost_jobs_stop_no_other_and_are_counted_at_the_end(folder, monkeypatch, most, sizes):
    from submitit.core.utils import UncompletedJobError

    monkeypatch.setattr(slurm, "wait_for_the_others", lambda error, folder: None)
    launched = []

    def multirun(words):
        launched.append(words)
        raise UncompletedJobError("7_0 has not produced any output")

    settings = OmegaConf.create(SETTINGS)
    settings.sweeper.max_batch_size = most
    with pytest.raises(ProcessFailed, match="5 jobs ended without a result"):
        run_cells(folder, settings, multirun)
    assert [words[-1].count(",") + 1 for words in launched] == sizes
    assert launched[-1][1] == "hydra.launcher.tasks_per_node=3"


def test_processes_are_checked_before_any_job_is_submitted(folder):
    settings = OmegaConf.create(SETTINGS)
    settings.launcher.tasks_per_node = 2
    with pytest.raises(UserError, match="cannot be split evenly"):
        run_cells(folder, settings, lambda words: pytest.fail("a job was submitted"))


def test_a_refusal_counts_as_no_sweep_only_before_the_first_job(folder, capsys):
    (folder / "logs").mkdir()
    (folder / "logs" / "submission_file.sh").touch()
    refused = UserError("SLURM refused the jobs")
    assert report_sweep(folder, refused) == 0
    (folder / "logs" / "7_0").mkdir()
    assert report_sweep(folder, refused) == 2
    assert "5 of 5 cells failed" in capsys.readouterr().err
