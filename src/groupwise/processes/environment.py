"""Reads which process of a run this is, and brings the processes of a run together, in lock-step."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.run import run
from groupwise.training.provenance import usable_cores
from groupwise.training.ranks import Ranks


@dataclass(frozen=True)
class Place:
    """One process of several: process r = d·S + s is stage s of replica d."""

    rank: int
    """r, over all machines."""
    world: int
    """S·D, the processes of the run."""
    local: int
    """The number on its own machine: which GPU it takes."""
    sharing: int
    """How many processes share the cores that it may use."""
    meeting: str
    """Where the processes find each other: torch's `init_method`."""

    @property
    def main(self) -> bool:
        """Is this the one that prints and writes the record?"""
        return self.rank == 0


def world_size(config: RunConfig) -> int:
    """How many processes a run has: stages times replicas."""
    return config.pipeline.stages * config.parallel.ranks


def name_of(config: RunConfig, rank: int) -> str:
    """A process in words: stage 1, replica 0, or stage 1 of replica 0."""
    replica, stage = divmod(rank, config.pipeline.stages)
    if config.pipeline.stages == 1:
        return f"replica {replica}"
    return f"stage {stage}" + (f" of replica {replica}" if config.parallel.ranks > 1 else "")


def find_place(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun or srun gave this process; None where nobody started several.

    Raises:
        UserError: they started another number of processes than the configuration asks for, or left a variable out.
    """
    try:
        place = _torchrun(environment) or _slurm(environment)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The environment looks like torchrun's or srun's, but a variable is missing or no number ({error}): "
            "start the run under one of the two, or unset RANK and SLURM_PROCID."
        ) from error
    world = world_size(config)
    if place is not None and place.world != world:
        if not place.main:
            sys.exit(2)  # once is enough
        launcher = "torchrun" if "RANK" in environment else "srun"
        raise UserError(
            f"{launcher} started {place.world} processes, but pipeline.stages={config.pipeline.stages} times "
            f"parallel.ranks={config.parallel.ranks} makes {world}: start as many, or change one of the two."
        )
    return place


def _torchrun(given: Mapping[str, str]) -> Place | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= given.keys():
        return None
    local = int(given.get("LOCAL_RANK", 0))
    sharing = int(given.get("LOCAL_WORLD_SIZE", 1))
    return Place(int(given["RANK"]), int(given["WORLD_SIZE"]), local, sharing, "env://")


def _slurm(given: Mapping[str, str]) -> Place | None:
    """A task of srun, which submitit uses too; a batch script by itself has no step, and one task is no several."""
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} <= given.keys() or int(given["SLURM_NTASKS"]) == 1:
        return None
    host = given.get("MASTER_ADDR") or first_host(given.get("SLURM_STEP_NODELIST") or given["SLURM_JOB_NODELIST"])
    own = 20000 + (int(given.get("SLURM_JOB_ID", 0)) * 17 + int(given["SLURM_STEP_ID"])) % 10000
    meeting = f"tcp://{host}:{given.get('MASTER_PORT', own)}"
    local = int(given.get("SLURM_LOCALID", 0))
    return Place(int(given["SLURM_PROCID"]), int(given["SLURM_NTASKS"]), local, 1, meeting)  # srun shares out the cores


def first_host(nodes: str) -> str:
    """The first of SLURM's list of machines: ``gpu[03-05,9],login`` -> ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else nodes


def interrupt_on(number: int) -> None:
    """Let a signal do what Ctrl-C does."""

    def interrupt(_: int, __: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(number, interrupt)


def silence(stream: Any) -> None:
    """Send a stream, and what C libraries write to it, nowhere."""
    stream.flush()
    with open(os.devnull, "ab") as file:
        os.dup2(file.fileno(), stream.fileno())


def run_here(config: RunConfig, place: Place) -> dict[str, Any]:
    """Be one process of a run; returns its result row, {} on all but the main one.

    Raises:
        UserError: a mistake, which other processes may have found too.
    """
    return _run(config, place, _meet(config, place))


def join(config: RunConfig, place: Place) -> dict[str, Any]:
    """As `run_here`, for a process that torchrun or srun started: the main one prints, and a mistake is told once."""
    interrupt_on(signal.SIGTERM)
    if not place.main:
        silence(sys.stdout)
    store = _meet(config, place)
    try:
        return _run(config, place, store)
    except UserError:
        if _first(store):
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        if place.main:
            raise
        sys.exit(130)


def _run(config: RunConfig, place: Place, store: dist.Store) -> dict[str, Any]:
    if config.train.threads is None:
        torch.set_num_threads(max(1, usable_cores() // place.sharing))
    device = _device(config, place)
    if device.type == "cuda":
        refuse_sharing(store, place, device)
    timeout = timedelta(seconds=config.pipeline.timeout)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    row = run(config, Ranks(config.pipeline.stages, device, timeout))
    dist.destroy_process_group()  # after an error it could wait for those that are gone
    return row


def _device(config: RunConfig, place: Place) -> torch.device:
    """A GPU of its own, where there are any."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < place.sharing:
        raise UserError(
            f"{place.sharing} processes need as many GPUs, and this machine has {count}: give fewer pipeline.stages or "
            "parallel.ranks, start them on several machines, or give train.device=cpu."
        )
    device = torch.device("cuda", place.local % count)
    torch.cuda.set_device(device)
    return device


def refuse_sharing(store: dist.Store, place: Place, device: torch.device) -> None:
    """Every process needs a GPU of its own; all of the run call this, before the first message goes through NCCL.

    Raises:
        UserError: two are on one GPU, which NCCL refuses, after a while and in other words.
    """
    known = torch.cuda.get_device_properties(device)
    own = f"{socket.gethostname()} {getattr(known, 'uuid', device.index)}"
    store.set(f"gpu of {place.rank}", own)
    there = [store.get(f"gpu of {rank}").decode() for rank in range(place.world)]
    together = [rank for rank, gpu in enumerate(there) if there.count(gpu) > 1 and gpu == own]
    if together:
        raise UserError(
            f"processes {' and '.join(map(str, together))} of this run would share one {known.name}, and each needs a "
            "GPU of its own: start fewer (pipeline.stages, parallel.ranks), or give each task its own, as srun "
            "--gpus-per-task=1 does."
        )


def _meet(config: RunConfig, place: Place) -> dist.Store:
    """Where processes leave word for each other."""
    timeout = timedelta(seconds=config.pipeline.timeout)
    try:
        store, _, _ = next(dist.rendezvous(place.meeting, place.rank, place.world, timeout=timeout))
    except (dist.DistError, OSError, RuntimeError) as error:
        raise UserError(
            f"The {place.world} processes did not find each other at {place.meeting} within "
            f"{config.pipeline.timeout:g} s ({str(error).splitlines()[0]}): start them all with the same MASTER_ADDR "
            "and MASTER_PORT."
        ) from error
    store.set_timeout(timeout)
    return store


def _first(store: dist.Store) -> bool:
    """Is this the first process that asks? If the store is gone, another one asked, told and left."""
    try:
        return store.add("told", 1) == 1
    except (dist.DistError, RuntimeError):
        return False
