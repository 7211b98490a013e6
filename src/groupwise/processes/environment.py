"""Reads from the environment which process of a run this is, if torchrun or srun started several."""

import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason


@dataclass(frozen=True)
class Place:
    """One process of several: process r = d·S + s has stage s of replica d."""

    rank: int
    """r, over all machines."""
    world: int
    """D·S, the number of processes of the run."""
    local: int
    """The number on its own machine, which chooses the GPU."""
    sharing: int
    """How many processes share the CPU cores that it may use."""
    meeting: str
    """Where the processes connect: torch's `init_method`."""

    @property
    def main(self) -> bool:
        """Whether this process prints and writes the record."""
        return self.rank == 0


def world_size(config: RunConfig) -> int:
    """The number of processes of a run: stages times replicas."""
    return config.pipeline.stages * config.parallel.ranks


def name_of(config: RunConfig, rank: int) -> str:
    """The name of a process in messages: stage 1, replica 0, or stage 1 of replica 0."""
    replica, stage = divmod(rank, config.pipeline.stages)
    if config.pipeline.stages == 1:
        return f"replica {replica}"
    return f"stage {stage}" + (f" of replica {replica}" if config.parallel.ranks > 1 else "")


def find_place(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process from the variables of torchrun or srun; None without them.

    Raises:
        UserError: the variables cannot be read, or the number of processes is not the configured one.
    """
    try:
        place = _torchrun(environment) or _slurm(environment)
    except (KeyError, ValueError) as error:
        raise UserError(f"The variables of torchrun or srun cannot be read ({reason(error)}): unset them.") from error
    world = world_size(config)
    if place is not None and place.world != world:
        if not place.main:
            sys.exit(2)  # the main process reports it
        launcher = "torchrun" if place.meeting == "env://" else "srun"
        raise UserError(
            f"{launcher} started {place.world} processes, but pipeline.stages={config.pipeline.stages} times "
            f"parallel.ranks={config.parallel.ranks} makes {world}: start {world}, or change one of the two."
        )
    return place


def _torchrun(given: Mapping[str, str]) -> Place | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= given.keys():
        return None
    local = int(given.get("LOCAL_RANK", 0))
    sharing = int(given.get("LOCAL_WORLD_SIZE", 1))
    return Place(int(given["RANK"]), int(given["WORLD_SIZE"]), local, sharing, "env://")


def _slurm(given: Mapping[str, str]) -> Place | None:
    """The place of a task of srun, which submitit uses too; None in a batch script (no step) and for a single task."""
    # SLURM_NTASKS may be the job's: in an interactive shell of salloc that is more than the shell, a single task.
    names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"}
    if not names <= given.keys() or int(given["SLURM_STEP_NUM_TASKS"]) == 1:
        return None
    host = given.get("MASTER_ADDR") or first_host(given.get("SLURM_STEP_NODELIST") or given["SLURM_JOB_NODELIST"])
    own = 20000 + (int(given.get("SLURM_JOB_ID", 0)) * 17 + int(given["SLURM_STEP_ID"])) % 10000
    meeting = f"tcp://{host}:{given.get('MASTER_PORT', own)}"
    local, sharing = int(given.get("SLURM_LOCALID", 0)), 1  # srun assigns cores to tasks
    return Place(int(given["SLURM_PROCID"]), int(given["SLURM_STEP_NUM_TASKS"]), local, sharing, meeting)


def first_host(nodes: str) -> str:
    """The first machine in SLURM's list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else nodes


def interrupt_on(number: int) -> None:
    """Let a signal act like Ctrl-C."""
    signal.signal(number, signal.default_int_handler)


def silence(stream: Any) -> None:
    """Discard what Python and C libraries write to a stream."""
    stream.flush()
    with open(os.devnull, "ab") as file:
        os.dup2(file.fileno(), stream.fileno())
