"""The small pipelines of `benchmarks.pipeline`: predicts and measures the memory of each."""

import json
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.meters import Step, peak_bytes
from groupwise.clipping import ClippingEngine, attach, flat
from groupwise.clipping.norm_methods import RATES
from groupwise.pipeline.runner import StageRunner
from groupwise.planner.accelerators import ACCELERATORS, Accelerator
from groupwise.planner.estimate import Estimate
from groupwise.planner.footprint import BatchFirst, Kind, Work, cut_out, inputs
from groupwise.planner.options import PlanOptions
from groupwise.privacy import NoiseSource, release_gradients
from groupwise.torchvision_import import import_torchvision_first
from groupwise.training.task import Microbatch

PARTITIONS = {"none": None, "device": flat}
LIMIT = timedelta(seconds=300)

ACCELERATORS["cpu"] = Accelerator("cpu", 1e12, {"float32": 1e11}, 1.0, 1e10, 1e9, 1e-4, reserved=0.0)
"""This machine's CPU. Only memory is predicted, so the speeds do not matter."""


@dataclass(frozen=True)
class Shape:
    """A GPT-2 with random weights in a pipeline.

    Args:
        stages: S.
        width, blocks, vocabulary: sizes of the model.
        microbatch, length, microbatches: b, T, J.
        rank: rank of the adapters; 0 trains all parameters.
        rematerialize: as in the options of the pipeline.
    """

    stages: int
    width: int
    blocks: int
    microbatch: int
    length: int
    microbatches: int
    rank: int = 8
    vocabulary: int = 1000
    rematerialize: bool = False


SHAPES = {
    "weights_2": Shape(2, width=512, blocks=8, microbatch=2, length=32, microbatches=8),
    "activations_2": Shape(2, width=256, blocks=4, microbatch=4, length=128, microbatches=4),
    "rematerialized_4": Shape(4, width=256, blocks=8, microbatch=8, length=128, microbatches=8, rematerialize=True),
    "full_4": Shape(4, width=384, blocks=4, microbatch=4, length=64, microbatches=8, rank=0, vocabulary=4000),
}


class Staged:
    """A shape and its stages, as the planner cuts it.

    Args:
        shape: the sizes of the model and the pipeline.
    """

    def __init__(self, shape: Shape) -> None:
        import_torchvision_first()
        from transformers import GPT2Config

        torch.set_num_threads(1)
        self.shape = shape
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
            rematerialize=shape.rematerialize,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.estimate = Estimate(options, config)
        self.ranges = self.estimate.ranges

    @property
    def work(self) -> Work:
        """The work of a stage."""
        return self.estimate.work

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each stage."""
        return self.estimate.kinds

    def predict(self, method: str) -> list[int]:
        """The peak memory of each process in bytes, as the planner predicts it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [memory.peak for memory in self.estimate.memory(self.work, method)]


def measure(staged: Staged, methods: Sequence[str]) -> dict[str, list[int]]:
    """Run the pipeline in its own processes, one method after the other; returns the peak bytes of each process."""
    stages = staged.shape.stages
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, staged.work, staged.kinds, staged.shape, list(methods))
        torch.multiprocessing.spawn(_process, arguments, nprocs=stages)
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(stages)]
    return {method: [process[method] for process in answers] for method in methods}


def _process(rank: int, folder: str, work: Work, kinds: list[Kind], shape: Shape, methods: list[str]) -> None:
    """The process of one stage."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timeout=LIMIT, rank=rank, world_size=len(kinds))
    peaks = {method: peak_bytes(partial(_step, work, kinds, rank, shape, method), "cpu")[0] for method in methods}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def _step(work: Work, kinds: list[Kind], rank: int, shape: Shape, method: str) -> Step:
    stage = cut_out(work, kinds[rank], "cpu")
    stage.index, stage.count = rank, len(kinds)  # `cut_out` treats it as the only stage of a model
    partition = PARTITIONS[method]
    engine = None if partition is None else attach(stage, partition(stage), 0.1, rates=RATES["cuda"])
    if engine is not None:
        engine.plan = BatchFirst()
    runner = StageRunner(stage, engine, torch.device("cpu"))
    microbatches = [_microbatch(work, cut_out(work, Kind(1, True, True))) for _ in range(shape.microbatches)]
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)  # as on a GPU
    noise = NoiseSource.from_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        if engine is not None:
            engine.reset()
        runner.run(microbatches, nothing_random)
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
