"""Making the trainer of a run whose model is whole on every process: alone, as a replica, or in shards."""

from typing import Any

import numpy as np
import torch

from groupwise.clipping import ClippingEngine, verify
from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, PoissonSampler, PrivacyPlan, ShuffleSampler
from groupwise.privacy.secure import SecurePoissonSampler
from groupwise.training.clipping import make_thresholds
from groupwise.training.loop import Trainer
from groupwise.training.microbatch import choose_microbatch
from groupwise.training.optim import make_optimizer, make_schedule
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.task import Task

CHECKED = 5
"""Examples that the engine is compared with a slow loop on, before training."""


def make_trainer(
    config: RunConfig,
    task: Task,
    engine: ClippingEngine | None,
    plan: PrivacyPlan,
    device: torch.device,
    ranks: Alone | Ranks,
    state: dict[str, Any] | None,
) -> Trainer:
    """A trainer with a verified engine, at its first step; `state` is the checkpoint that it will go on from, if any.

    With replicas every process calls it: the model becomes the first one's, and the noise key the main one's.
    `parallel.kind=fsdp` shards the model, and the trainer's engine is then another than `engine`.

    Raises:
        UserError: the checkpoint belongs to another plan; the model cannot be clipped or sharded.
    """
    check_plan(plan, state)
    noise = make_noise(config, plan, ranks, state)
    microbatch = config.train.microbatch
    if microbatch is None and state is None:
        microbatch = choose_microbatch(task.losses, task.model, device, task.order(np.arange(task.train_size)))
        microbatch = min(ranks.gather(microbatch))
    if engine is not None:
        coarse = {"tolerance": 0.3, "loss_tolerance": 0.05} if config.train.precision == "bfloat16" else {}
        some = examples_to_check(task.order(np.arange(task.train_size)))
        verify(engine, task.losses, some, rows=min(CHECKED, max(2, microbatch or CHECKED)), **coarse)
    make: type[Trainer] = Trainer
    if ranks.replicas > 1:
        ranks.copy_([*task.model.parameters(), *task.model.buffers()])
        if config.parallel.kind == "fsdp":
            from groupwise.training.shards import ShardedTrainer, shard

            engine = shard(task.model, engine, config.clip, device)
            make = ShardedTrainer
    optimizer = make_optimizer(task.model.parameters(), config.optim)
    return make(
        task=task,
        engine=engine,
        thresholds=None if engine is None else make_thresholds(config.clip, plan),
        plan=plan,
        sampler=make_sampler(plan, noise),
        noise=noise,
        allocation=config.noise.allocation,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config.optim, plan.steps),
        microbatch=microbatch or 1,
        device=device,
        ranks=ranks,
    )


def examples_to_check(order: np.ndarray) -> list[int]:
    """Examples of different kinds, the longest first: the shortest, the first and the last, and some in between.

    Args:
        order: all examples, (N,), as `Task.order` puts them.
    """
    kinds = [order[0], order[-1], order.min(), order.max(), *(order[len(order) * part // 4] for part in (2, 1, 3))]
    return list(dict.fromkeys(int(i) for i in kinds))[:CHECKED]


def check_plan(plan: PrivacyPlan, state: dict[str, Any] | None) -> None:
    """Refuse a checkpoint that was made under another plan, or holds something else."""
    if state is None:
        return
    if not {"plan", "step", "noise_key", "noise_is_secret"} <= state.keys():
        raise UserError("The checkpoint is none of a run: bring its own back, or start afresh with overwrite=true.")
    if state["plan"] != plan.to_dict():
        raise UserError(
            "The checkpoint was made under another privacy plan (other data, software or settings): bring those "
            "back, or start afresh with overwrite=true."
        )


def make_sampler(plan: PrivacyPlan, noise: NoiseSource) -> PoissonSampler | ShuffleSampler:
    """The same batches on every process, as they follow from the run's key."""
    key = noise.derive("sampling")
    if plan.sampling == "shuffle":
        return ShuffleSampler(plan.dataset_size, round(plan.expected_batch_size), key)
    sampler = SecurePoissonSampler if noise.secure else PoissonSampler
    return sampler(plan.dataset_size, plan.sample_rate, key)


def make_noise(config: RunConfig, plan: PrivacyPlan, ranks: Alone | Ranks, state: dict[str, Any] | None) -> NoiseSource:
    """The main process's source: the checkpoint's key, so that replayed steps repeat their noise; else entropy, or a
    seed (no secret)."""
    noise = _noise_source(config, plan, state)
    key, is_secret = ranks.told((noise.key, noise.is_secret))
    return NoiseSource.from_key(key, is_secret, config.noise.secure)


def _noise_source(config: RunConfig, plan: PrivacyPlan, state: dict[str, Any] | None) -> NoiseSource:
    if state is not None:
        return NoiseSource.from_key(state["noise_key"], state["noise_is_secret"])
    if config.debug.noise_seed is not None:
        return NoiseSource.from_seed(config.debug.noise_seed)
    return NoiseSource.fresh() if plan.noise_multiplier > 0 else NoiseSource.from_seed(config.seed)
