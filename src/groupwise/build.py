"""Builds the trainer of a run: a single process, a replica, a shard, or a stage of a pipeline."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine, verify
from groupwise.clipping.clip_plan import LENGTHS
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.models.hub import find_source
from groupwise.pipeline.loading import FILES, empty_model, load_stage
from groupwise.pipeline.split import Ranges, choose_ranges, cut
from groupwise.pipeline.stage import Stage, TextStage
from groupwise.privacy import NoiseSource, PrivacyPlan
from groupwise.tasks import make_task
from groupwise.tasks.text_generation import make_text_generation
from groupwise.training.from_config import autocast, make_optimizer, make_schedule, make_thresholds, tolerances
from groupwise.training.graphs import Graphs, recorder_of
from groupwise.training.guards import unfitted
from groupwise.training.memory import choose_microbatch, fill_evenly, halve_on_oom
from groupwise.training.microbatches import CHECKED, TaskSums, examples_to_trace
from groupwise.training.private_step import BatchSums, PrivateStep
from groupwise.training.ranks import Ranks
from groupwise.training.shards import shard
from groupwise.training.step import Trainer
from groupwise.training.task import Microbatch, Task


def build_trainer(
    config: RunConfig,
    task: Task,
    engine: ClippingEngine | None,
    plan: PrivacyPlan,
    device: torch.device,
    ranks: Ranks,
    state: dict[str, Any] | None,
) -> Trainer:
    """A trainer with a verified engine, before its first step.

    All processes of a run call this. Replicas get the weights of the first one and the noise key of the main process.
    With `parallel.kind=fsdp` the model is sharded, and the trainer has a new engine. `task.model` may be a stage of a
    pipeline (`build_stage_task`). `state` is the checkpoint to resume from; only its plan and key are used here.

    Raises:
        UserError: the checkpoint belongs to another plan; the model cannot be clipped or sharded.
    """
    if state is not None and state.get("plan") != plan.to_dict():
        raise UserError(
            "The checkpoint has another privacy plan: restore data, settings and software, or give overwrite=true."
        )
    noise = make_noise(config, plan, ranks, state)
    sums: Any
    if isinstance(task.model, Stage):
        sums = _stage_sums(config, task, engine, plan, device, ranks, state is None)
    else:
        sums, engine = _task_sums(config, task, engine, plan, device, ranks, state is None)
    optimizer = make_optimizer(task.model.parameters(), config.optim)
    private = PrivateStep(
        model=task.model,
        engine=engine,
        thresholds=None if engine is None else make_thresholds(config.clip, plan, here=len(engine.groups)),
        plan=plan,
        noise=noise,
        allocation=config.noise.allocation,
        optimizer=optimizer,
        device=device,
        sums=sums,
        ranks=ranks,
    )
    schedule = make_schedule(optimizer, config.optim, plan.steps)
    if isinstance(task.model, Stage):
        from groupwise.pipeline.trainer import PipelineTrainer

        return PipelineTrainer(task=task, private=private, schedule=schedule)
    return Trainer(task=task, private=private, schedule=schedule)


def _task_sums(
    config: RunConfig,
    task: Task,
    engine: ClippingEngine | None,
    plan: PrivacyPlan,
    device: torch.device,
    ranks: Ranks,
    new: bool,
) -> tuple[BatchSums, ClippingEngine | None]:
    """Verify the engine of a whole model; returns the sums and the engine, a new one if the model is sharded."""
    microbatch = config.train.microbatch
    examples = task.order(np.arange(task.train_size))
    with nullcontext() if engine is None else unfitted(task.model):
        if microbatch is None and new:
            fits = min(ranks.gather(choose_microbatch(task.losses_of, task.model, device, examples)))
            microbatch = fill_evenly(fits, plan.expected_batch_size / ranks.replicas)
        if engine is not None:
            some = examples_to_trace(examples, CHECKED)
            check = partial(verify, engine, task.losses_of, some, **tolerances(config.train.precision))
            most = microbatch or CHECKED
            halve_on_oom(most, lambda most: check(most=most, rows=max(2, most)), "checking", alone=True)
    if ranks.replicas > 1:
        ranks.copy_([*task.model.parameters(), *task.model.buffers()])
        if config.parallel.kind == "fsdp":
            engine = shard(task.model, engine, config.clip, device)
    size = microbatch or 1
    graphs = Graphs(recorder_of(device), task.model) if config.train.cuda_graph else None
    return TaskSums(task, size, graphs), engine


MICROBATCHES_PER_STAGE = 4
"""With this many, stages are idle for at most a fifth of the time (Huang et al., 2019)."""


def _stage_sums(
    config: RunConfig,
    task: Any,
    engine: ClippingEngine | None,
    plan: PrivacyPlan,
    device: torch.device,
    ranks: Any,
    new: bool,
) -> BatchSums:
    """Verify the engine of a pipeline stage; returns the stage's sums."""
    # Imported here, because transformers and torch's pipelining take seconds, which other runs should not pay.
    from groupwise.pipeline.runner import StageRunner
    from groupwise.pipeline.trainer import StageSums

    stage, feed, microbatch = task.model, task.feed("train", device), config.train.microbatch
    examples = feed.order(np.arange(len(feed)))
    if engine is not None:
        chosen = np.array(examples_to_trace(examples))
        some = feed.microbatches(chosen, len(chosen))[0]
        rows = min(CHECKED, max(2, microbatch or CHECKED))
        length = some.first.shape[-1]
        for kept in range(length - LENGTHS + 1, length + 1):  # then any length is known, to which a batch is padded
            losses = losses_of_stage(stage, _shortened(some, kept), device)
            engine.trace(losses, range(some.examples))
        coarse = tolerances(config.train.precision)
        verify(engine, losses, range(min(CHECKED, some.examples)), rows=rows, most=rows, **coarse)
    if microbatch is None and new:
        longest = feed.microbatches(examples[:1], 1)[0]
        losses = losses_of_stage(stage, longest, device)
        fits = choose_microbatch(losses, stage, device, np.arange(1), len(feed))
        keeps_busy = int(plan.expected_batch_size) // (MICROBATCHES_PER_STAGE * stage.count * ranks.replicas)
        microbatch = min(*ranks.gather(fits // stage.count), keeps_busy)
    ranks.copy_([*stage.parameters(), *stage.buffers()])
    runner = StageRunner(stage, engine, device, ranks.pipeline)
    return StageSums(runner, feed, max(1, microbatch or 1), config.clip.grouping == "flat")


def make_noise(config: RunConfig, plan: PrivacyPlan, ranks: Ranks, state: dict[str, Any] | None) -> NoiseSource:
    """The noise source of the main process, for all processes.

    With a checkpoint it has the checkpoint's key, so that replayed steps repeat their noise. Otherwise the key is new
    and secret, or derived from a public seed.
    """
    secure, seed = config.noise.secure, config.debug.noise_seed
    if state is not None:
        noise = NoiseSource.from_state(state)
    elif seed is None and plan.noise_multiplier > 0 and not config.data.public:
        noise = NoiseSource.fresh(secure)
    else:
        noise = NoiseSource.from_seed(config.seed if seed is None else seed, secure)
    return NoiseSource.from_state(ranks.broadcast(noise.state_dict()))


def build_stage_task(config: RunConfig, ranks: Ranks, device: torch.device) -> Task:
    """The task of `config`, whose model is this process's stage on `device`.

    If only adapters train and the weights are in a folder, a process reads those of its stage alone. Otherwise every
    process makes the same whole model on the CPU, and keeps its stage.

    Raises:
        UserError: as for `make_task`; the model cannot be cut this way.
    """
    pipeline = config.pipeline
    parts: dict[str, Any] = {
        "rematerialize": pipeline.rematerialize,
        "token_loss": config.train.token_loss,
        "precision": autocast(config.train.precision, device),
    }
    choose = partial(choose_ranges, stages=pipeline.stages, by_hand=pipeline.blocks)
    if (folder := _folder_of_weights(config)) is not None:
        settings = replace(config.model, source=str(folder))
        task: Any = make_text_generation(config, device, lambda _, tokenizer: empty_model(settings, tokenizer))
        stage = load_stage(settings, task.tokenizer, choose, ranks.stage, seed=config.seed, device=device, **parts)
    else:
        task = make_task(config, torch.device("cpu"))
        stage = _cut_stage(task.model, choose(task.model), ranks.stage, parts).to(device)
    task.model = stage
    task.precision = nullcontext  # the stage applies the run's precision itself
    return task


def _folder_of_weights(config: RunConfig) -> Path | None:
    """The folder from which a stage can read its own weights alone, or None."""
    model = config.model
    if model.fresh or model.trains != "lora" or not model.source:
        return None
    folder = Path(find_source(model.source))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with suppress(HFValidationError, LocalEntryNotFoundError):
            folder = Path(snapshot_download(model.source, local_files_only=True))
    return folder if any((folder / name).is_file() for name in FILES) else None


def _cut_stage(model: nn.Module, ranges: Ranges, index: int, parts: dict[str, Any]) -> Stage:
    """Cut a stage out, and free the memory of the others, which the task may still refer to."""
    parameters = list(model.parameters())
    stage = cut(model, ranges, index, **parts)
    kept = {id(parameter) for parameter in stage.parameters()}
    for parameter in parameters:
        if id(parameter) not in kept:
            parameter.data = parameter.new_empty(0)
    return stage


def _shortened(microbatch: Microbatch, length: int) -> Microbatch:
    """The first `length` tokens of each row. Targets after them are predicted at the last one."""
    kwargs = {name: value[:, :length] for name, value in microbatch.kwargs.items() if name in TextStage.reads}
    kwargs["places"] = microbatch.kwargs["places"].clamp(max=length - 1)
    return Microbatch(microbatch.first[:, :length], microbatch.kwargs | kwargs)


def losses_of_stage(
    stage: Stage, microbatch: Microbatch, device: torch.device
) -> Callable[[Sequence[int] | np.ndarray], Tensor]:
    """A function from n rows of a microbatch to n losses, (n,), computed by this stage alone.

    A stage that is not the first gets random activations. A stage that is not the last returns the dot product of its
    outputs with random numbers, so that the whole backward pass runs.
    """
    generator = torch.Generator().manual_seed(0)

    def random(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, device="cpu").to(device)

    shape = stage.activation(microbatch.examples, microbatch.first.shape[-1])
    given = microbatch.first if stage.first else random(shape).to(stage.dtype)
    direction = None if stage.last else random(shape)

    def losses(rows: Sequence[int] | np.ndarray) -> Tensor:
        at = torch.as_tensor(np.asarray(rows, dtype=np.int64), device=device)
        made = stage(given[at], **{name: value[at] for name, value in microbatch.kwargs.items()})
        return made if direction is None else (made.float() * direction[at]).flatten(1).sum(1)

    return losses
