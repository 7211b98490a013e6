"""Several gloo processes on this machine, for tests that need more than one.

The processes are kept for the next call, because their imports take seconds; each call makes a new process group.
"""

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import FORKS
from tests.waiting import PATIENCE


class _Worker:
    """A process that waits for work, and ends with this one."""

    def __init__(self) -> None:
        self.pipe, there = FORKS.Pipe()
        self.process = FORKS.Process(target=_live, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


_workers: list[_Worker] = []


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """Run ``function(rank, world, *args)`` in ``world`` gloo processes of one thread each; their results, by rank.

    ``function`` is defined at the top of its module and does not change the state of its process; arguments and
    results can be pickled. The default process group is initialised before the call.

    Raises:
        AssertionError: with the traceback of the process that failed first, or when ``timeout`` seconds have passed.
    """
    work = pickle.dumps((function, args))
    _workers.extend(_Worker() for _ in range(world - len(_workers)))
    pipes = {worker.pipe: rank for rank, worker in enumerate(_workers[:world])}
    with tempfile.TemporaryDirectory() as folder:
        for pipe, rank in pipes.items():
            pipe.send((work, str(Path(folder) / "meeting"), rank, world, timeout))
        try:
            found = _collect(pipes, time.monotonic() + timeout)
        except BaseException:
            for worker in _workers:
                worker.kill()
            _workers.clear()
            raise
    return [found[rank] for rank in range(world)]


def _collect(pipes: dict[Any, int], deadline: float) -> dict[int, Any]:
    """Collect results as they arrive; the first failure raises, without waiting for the other processes."""
    found: dict[int, Any] = {}
    left = dict(pipes)
    while left:
        ready = wait(list(left), max(deadline - time.monotonic(), 0))
        assert ready, f"Processes {sorted(left.values())} did not end in time."
        for pipe in ready:
            rank = left.pop(pipe)
            try:
                failed, found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"Process {rank} ended without a result.") from None
            assert not failed, f"Process {rank} failed:\n{found[rank]}"
    return found


def _live(pipe: Connection) -> None:
    """The loop of a worker process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.set_threshold(500_000, 10, 10)  # as in the process of the tests
    while True:
        try:
            work, meeting, rank, world, timeout = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(work)
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
            message = (False, function(rank, world, *args))
        except BaseException:
            message = (True, traceback.format_exc())
        if not message[0]:
            dist.destroy_process_group()  # before its store's folder is removed, or it waits for minutes
        pipe.send_bytes(pickle.dumps(message))
        if message[0]:
            return
