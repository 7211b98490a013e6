"""Hydra's side of a cluster: each cell a job of SLURM, those of as many processes an array, through submitit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import open_dict


class SlurmLauncher(BaseSubmititLauncher):
    """As hydra-submitit-launcher's; but stopped jobs go on, processes are tasks, and a lost job ends no other."""

    _EXECUTOR = "slurm"

    def __call__(self, *args: Any, **kwargs: Any) -> JobReturn:
        """Run a cell, in a task of its job; a failure is raised, so that SLURM knows of it."""
        from groupwise.config.compose import register
        from groupwise.sweeps.slurm import in_job

        register()
        done = in_job(lambda: super(SlurmLauncher, self).__call__(*args, **kwargs), self.params["signal_delay_s"])
        done.return_value  # noqa: B018 (raises what the cell raised)
        return done

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit all cells, wait for them, and return what came of each; one that failed ends no other."""
        import submitit

        from groupwise.errors import UserError
        from groupwise.processes.environment import world_size
        from groupwise.sweeps import slurm

        slurm.require_slurm()
        configs = [self._compose(overrides) for overrides in job_overrides]
        arrays: dict[int, list[int]] = {}
        for number, config in enumerate(configs):
            arrays.setdefault(world_size(config), []).append(number)
        jobs: dict[int, Any] = {}
        try:
            for processes, numbers in arrays.items():
                executor = submitit.AutoExecutor(self.params["submitit_folder"], cluster=self._EXECUTOR)
                executor.update_parameters(**slurm.parameters(self.params, processes))
                calls = [self._call(job_overrides[number], initial_job_idx + number) for number in numbers]
                jobs |= zip(numbers, executor.map_array(self, *zip(*calls, strict=True)), strict=True)
                self._tell(configs, numbers, jobs)
            slurm.wait_for(job.job_id for job in jobs.values())
        except submitit.core.utils.UncompletedJobError as error:
            last = str(error).strip().splitlines()[-1].removeprefix("sbatch: error: ")
            raise UserError(f"SLURM refused the jobs ({last}): see what hydra.launcher.* says.") from error
        except KeyboardInterrupt:
            first = " ".join(sorted({job.job_id.split("_")[0] for job in jobs.values()}, key=int))
            print(f"The jobs go on without this command; scancel {first} ends them.", file=sys.stderr)
            raise
        return [self._returned(job_overrides[number], configs[number], jobs[number].task(0)) for number in sorted(jobs)]

    def _compose(self, overrides: Sequence[str]) -> Any:
        from groupwise.config.compose import to_run_config

        assert self.hydra_context is not None and self.config is not None
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            del composed["hydra"]
        return to_run_config(composed)

    def _call(self, overrides: Sequence[str], number: int) -> tuple[Any, ...]:
        return list(overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state()

    def _tell(self, configs: Sequence[Any], numbers: Sequence[int], jobs: dict[int, Any]) -> None:
        """Say what was submitted, and let logs/<hash>.log be the log of the cell's job."""
        from groupwise.processes.environment import world_size

        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            link, log = logs / f"{_key(configs[number])}.log", jobs[number].task(0).paths.stdout
            link.unlink(missing_ok=True)
            link.symlink_to(log.relative_to(logs.absolute()) if log.is_relative_to(logs.absolute()) else log)
        job, tasks = jobs[numbers[0]].job_id.split("_")[0], world_size(configs[numbers[0]])
        told = f"Submitted job {job} (cells: {len(numbers)}, tasks of each: {tasks}); logs: {logs}"
        print(told, file=sys.stderr, flush=True)

    @property
    def _folder(self) -> Path:
        assert self.config is not None
        return Path(str(self.config.hydra.sweep.dir))

    def _returned(self, overrides: Sequence[str], config: Any, job: Any) -> JobReturn:
        from groupwise.errors import ProcessFailed
        from groupwise.sweeps.folder import write_failure
        from groupwise.sweeps.slurm import outcome_of

        try:
            return outcome_of(job.job_id, job.paths.result_pickle, job.paths.stdout)
        except ProcessFailed as error:
            if not (self._folder / "failed" / f"{_key(config)}.txt").is_file():  # the cell could not say so itself
                write_failure(self._folder, _key(config), " ".join(filter_overrides(list(overrides))), error, None)
            lost = JobReturn(overrides=list(overrides), status=JobStatus.FAILED)
            lost.return_value = error
            return lost


def _key(config: Any) -> str:
    """As the run's folder and the files of the sweep's folder are called."""
    from groupwise.config.identity import config_hash

    return config_hash(config)[:12]
