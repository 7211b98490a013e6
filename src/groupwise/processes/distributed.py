"""Connects the processes of a run, and runs it in each of them."""

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
    """As `run_here`, for a process of torchrun or srun: only the main one prints, and one reports an error."""
    interrupt_on(signal.SIGTERM)
    if not place.main:
        silence(sys.stdout)
    store = _meet(config, place)
    try:
        return run_here(config, place, store)
    except (UserError, RuntimeError) as error:  # torch raises RuntimeError where another process has ended
        if _first(store):
            raise
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        if place.main:
            raise
        sys.exit(130)


def run_here(config: RunConfig, place: Place, store: dist.Store | None = None) -> dict[str, Any]:
    """Run as one process of several; returns the result row on the main process, {} on others.

    Raises:
        UserError: a mistake, which other processes may find too.
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
    dist.destroy_process_group()  # not after an error, when it could wait for processes that have ended
    return row


def _device(config: RunConfig, place: Place) -> torch.device:
    """A GPU for this process alone if there are GPUs, else the CPU."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < place.sharing or place.local >= count > 1:  # srun may show each process only its own GPU
        raise UserError(
            f"There are more processes on this machine than its {count} GPUs: give fewer pipeline.stages or "
            "parallel.ranks, start them on several machines, or give train.device=cpu."
        )
    device = torch.device("cuda", place.local % count)
    torch.cuda.set_device(device)
    return device


def _meet(config: RunConfig, place: Place) -> dist.Store:
    """The store through which the processes of the run connect."""
    timeout = timedelta(seconds=config.pipeline.timeout)
    try:
        store, _, _ = next(dist.rendezvous(place.meeting, place.rank, place.world, timeout=timeout))
    except (dist.DistError, OSError, RuntimeError) as error:
        raise UserError(
            f"The {place.world} processes could not connect at {place.meeting} within "
            f"{config.pipeline.timeout:g} s ({str(error).splitlines()[0]}): start them all with the same MASTER_ADDR "
            "and MASTER_PORT."
        ) from error
    store.set_timeout(timeout)
    return store


def _first(store: dist.Store) -> bool:
    """Whether this process is the first to ask. If the store is gone, another process has reported and ended."""
    try:
        return store.add("reported", 1) == 1
    except (dist.DistError, RuntimeError):
        return False
