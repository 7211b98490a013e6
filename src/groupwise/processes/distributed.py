"""Brings the processes of a run together, and goes through the run in lock-step with them."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.processes.environment import Place, interrupt_on, silence
from groupwise.run import run
from groupwise.training.provenance import usable_cores
from groupwise.training.ranks import Ranks


def join(config: RunConfig, place: Place) -> dict[str, Any]:
    """As `run_here`, for a process that torchrun or srun started: only the main one prints and reports mistakes."""
    interrupt_on(signal.SIGTERM)
    if not place.main:
        silence(sys.stdout)
    store = _meet(config, place)
    try:
        return run_here(config, place, store)
    except UserError:
        if _first(store):
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        if place.main:
            raise
        sys.exit(130)


def run_here(config: RunConfig, place: Place, store: dist.Store | None = None) -> dict[str, Any]:
    """Be one process of a run; returns its result row, {} on all but the main one.

    Raises:
        UserError: a mistake, which other processes may have found too.
    """
    store = _meet(config, place) if store is None else store
    if config.train.threads is None:
        torch.set_num_threads(max(1, usable_cores() // place.sharing))
    device = _device(config, place)
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


def _meet(config: RunConfig, place: Place) -> dist.Store:
    """The store through which the processes of the run find each other."""
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
    """Whether this process is the first to ask. If the store is gone, another one has reported and exited."""
    try:
        return store.add("reported", 1) == 1
    except (dist.DistError, RuntimeError):
        return False
