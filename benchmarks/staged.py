"""One shape of `benchmarks.pipeline`: what the planner says of it, and what its processes say."""

import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.meters import Step, peak_bytes
from benchmarks.pipeline_shapes import Shape
from groupwise.clipping import ClippingEngine, attach, flat, per_layer
from groupwise.pipeline.runner import StageRunner
from groupwise.planner.estimate import Estimate, kinds
from groupwise.planner.footprint import BatchFirst, Kind, Work, cut_out, inputs
from groupwise.planner.options import PlanOptions
from groupwise.planner.timeline import Setting
from groupwise.privacy import NoiseSource, release_gradients
from groupwise.torchvision_import import mend_torchvision
from groupwise.training.task import Microbatch

PARTITIONS = {"none": None, "device": flat, "layer": per_layer, "flat": flat}
LIMIT = timedelta(seconds=300)


@dataclass(frozen=True)
class Found:
    """What processes said of the fastest of their steps.

    Args:
        peaks: bytes of each process at its fullest.
        wall: seconds of the step.
        cpu: seconds of each process in it.
        cores: processors that other programs left to them meanwhile.
    """

    peaks: list[int]
    wall: float
    cpu: list[float]
    cores: float


@dataclass(frozen=True)
class Foretold:
    """What the planner says of it: bytes and CPU seconds of each process, and what the wall time follows from."""

    peaks: list[int]
    cpu: list[float]
    setting: Setting
    twice: bool

    def wall(self, cores: float) -> float:
        """Seconds of the step on so many processors."""
        setting = replace(self.setting, cores=cores)
        return setting.flat if self.twice else setting.per_device


class Staged:
    """A shape cut into stages, as the planner sees it.

    Args:
        shape: its sizes.
        cores: processors that all processes share.
    """

    def __init__(self, shape: Shape, cores: int) -> None:
        mend_torchvision()
        from transformers import GPT2Config

        torch.set_num_threads(1)
        self.shape, self.cores = shape, cores
        config = GPT2Config(
            n_layer=shape.blocks,
            n_embd=shape.width,
            n_head=max(1, shape.width // 64),
            vocab_size=shape.vocabulary,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        options = PlanOptions(
            model="gpt2",
            devices=shape.stages,
            accelerator="cpu",
            microbatch=shape.microbatch,
            length=shape.length,
            batch=shape.microbatch * shape.microbatches,
            rank=shape.rank,
            schedule=shape.schedule,
            rematerialize=shape.rematerialize,
            cores=cores,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.estimate = Estimate(options, config)
        self.ranges = self.estimate.ranges(self.work)

    @property
    def work(self) -> Work:
        """What a stage is asked to do."""
        return self.estimate.work

    @property
    def kinds(self) -> list[Kind]:
        """What each stage is."""
        return kinds(self.ranges)

    def predict(self, method: str) -> Foretold:
        """What the planner says; its blocks are timed now, in this process."""
        twice = method == "flat"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            setting = self.estimate.setting(self.work, self.ranges, "sums" if twice else method)
            peaks = [memory.peak for memory in self.estimate.memory(self.work, self.ranges, method)]
        each = zip(setting.forward, setting.backward, setting.norms, strict=True)
        once = [f + b + (f + norms if twice else 0.0) for f, b, norms in each]
        cpu = [setting.microbatches * seconds + setting.update for seconds in once]
        return Foretold(peaks, cpu, setting, twice)


def measure(staged: Staged, methods: Sequence[str], steps: int) -> dict[str, Found]:
    """Run the pipeline in processes of its own, one method after the other; the fastest of `steps` steps counts."""
    stages = staged.shape.stages
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, staged.work, staged.kinds, staged.shape, list(methods), steps)
        torch.multiprocessing.spawn(_process, arguments, nprocs=stages)
        said = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(stages)]
    return {method: _found([process[method] for process in said], staged.cores) for method in methods}


def _found(processes: list[dict[str, Any]], cores: int) -> Found:
    walls = [max(step) for step in zip(*(process["wall"] for process in processes), strict=True)]
    best = walls.index(min(walls))
    cpu = [process["cpu"][best] for process in processes]
    others = max(processes[0]["busy"][best] - sum(cpu), 0.0) / walls[best]
    return Found(
        [process["peak"] for process in processes], walls[best], cpu, max(cores - others, sum(cpu) / walls[best])
    )


def _process(
    rank: int, folder: str, work: Work, kinds: list[Kind], shape: Shape, methods: list[str], steps: int
) -> None:
    """One stage's whole life."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timeout=LIMIT, rank=rank, world_size=len(kinds))
    said = {}
    for method in methods:
        make = partial(_step, work, kinds, rank, shape, method)
        peak, step = peak_bytes(make, "cpu")
        said[method] = {"peak": peak, **_timed(step, steps)}
        del step
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def _timed(step: Step, steps: int) -> dict[str, list[float]]:
    said: dict[str, list[float]] = {"wall": [], "cpu": [], "busy": []}
    for _ in range(1 + steps):  # the first to warm up
        dist.barrier()
        wall, cpu, busy = time.perf_counter(), time.process_time(), _busy()
        step()
        cpu = time.process_time() - cpu
        dist.barrier()
        for key, value in (("wall", time.perf_counter() - wall), ("cpu", cpu), ("busy", _busy() - busy)):
            said[key].append(value)
    return {key: values[1:] for key, values in said.items()}


def _busy() -> float:
    """Seconds that all processors of the machine have worked, for whatever program; 0 where Linux does not say."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft, stolen = ticks[:8]
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _step(work: Work, kinds: list[Kind], rank: int, shape: Shape, method: str) -> Step:
    stage = cut_out(work, kinds[rank], "cpu")
    stage.index, stage.count = rank, len(kinds)  # of a model of just these blocks until now
    partition = PARTITIONS[method]
    engine = None if partition is None else attach(stage, partition(stage), 0.1, rates=work.rates)
    if engine is not None:
        engine.plan = BatchFirst()
    runner = StageRunner(stage, engine, torch.device("cpu"), shape.schedule)
    microbatches = [_microbatch(work, cut_out(work, Kind(1, True, True))) for _ in range(shape.microbatches)]
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    noise = NoiseSource.from_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        if engine is not None:
            engine.reset()
        (runner.run_flat if method == "flat" else runner.run)(microbatches, nothing_random)
        if engine is not None:
            _release(engine, noise)
        optimizer.step()

    return step


def nothing_random(_: int) -> AbstractContextManager[object]:
    return nullcontext()


def _microbatch(work: Work, first: Any) -> Microbatch:
    ids, kwargs = inputs(first, work)
    return Microbatch(ids, kwargs)


def _release(engine: ClippingEngine, noise: NoiseSource) -> None:
    release_gradients(
        engine.sensitivity("add_remove"),
        allocation="equal_budget",
        noise_multiplier=1.0,
        expected_batch_size=1.0,
        noise=noise,
        step=0,
    )
