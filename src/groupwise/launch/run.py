"""One run, from a configuration to its row: everything is checked and made here before anything is written."""

from typing import Any

import numpy as np
import torch

from groupwise.clipping import ClippingEngine, explain
from groupwise.clipping.verify import verify
from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.launch.in_context import evaluate_in_context
from groupwise.privacy import NoiseSource, PoissonSampler, PrivacyPlan, ShuffleSampler, make_plan
from groupwise.tasks import make_task
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.clipping import make_engine, make_thresholds
from groupwise.training.loop import Trainer
from groupwise.training.microbatch import choose_microbatch
from groupwise.training.optim import make_optimizer, make_schedule
from groupwise.training.record import RunRecord
from groupwise.training.session import train
from groupwise.training.task import Task


def run(config: RunConfig) -> dict[str, Any]:
    """Train one cell, or take it up where it was left; returns its result row.

    Nothing is written before data, model, clipping and plan have been checked.

    Raises:
        UserError: anything that the user can mend.
    """
    record = RunRecord.open(config)
    if record.finished and not config.explain:
        print(f"Done already: {record.folder} (overwrite=true runs it again)")
        return record.result()
    device = choose_device(config.train.device)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    task = make_task(config, device)
    described = task.describe_data()
    if "generated" in described:
        print(f"Data: {described['source']}; {described['generated']}.")
    if config.export is not None and not task.exports:
        raise UserError(f"export is for language models: for task={config.task} take model.pt from the run's folder.")
    if config.eval.shots is not None:
        return evaluate_in_context(config, record, task, device)
    engine = make_engine(task.model, config.clip)
    plan = plan_run(config, task.train_size, engine)
    print(plan.statement())
    if config.debug.noise_seed is not None and plan.noise_multiplier > 0:
        print("  NOT PRIVATE all the same: debug.noise_seed makes the noise predictable, which is for tests only.")
    state = load_checkpoint(record.checkpoint, device) if record.resumable else None
    trainer = _make_trainer(config, task, engine, plan, device, state)
    if engine is not None:
        coarse = {"tolerance": 0.3, "loss_tolerance": 0.05} if config.train.precision == "bfloat16" else {}
        verify(engine, task.losses, range(min(3, task.train_size)), **coarse)
    if config.explain:
        return _explain(trainer)
    start = 0 if state is None else int(state["step"])
    if state is not None:
        trainer.load_state_dict(state, start)
    record.begin()
    try:
        return train(config, record, trainer, start, state or {})
    finally:
        record.close()
        if engine is not None:
            engine.detach()


def _explain(trainer: Trainer) -> dict[str, Any]:
    """Print the cost model's choices for one microbatch of the size that training will use."""
    if trainer.engine is None:
        print("clip=none clips nothing, so there are no norms to explain.")
        return {}
    size = min(trainer.microbatch, trainer.task.train_size)
    trainer.engine.backward(trainer.task.losses(range(size)))
    print(f"How norms are computed, for microbatches of {size} examples:\n{explain(trainer.engine)}")
    trainer.engine.detach()
    return {}


def choose_device(name: str) -> torch.device:
    """The named device; "auto" takes CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"train.device={name} was asked for, but torch sees no GPU: use train.device=cpu, or auto.")
    return torch.device(name)


def plan_run(config: RunConfig, train_size: int, engine: ClippingEngine | None) -> PrivacyPlan:
    """The privacy plan: B and T from the configuration, K from the engine; without clipping, no guarantee."""
    batch_size = _expected_batch_size(config, train_size)
    steps = config.train.steps
    if steps is None:
        steps = round(config.train.epochs * train_size / batch_size)
    epsilon, multiplier = config.privacy.epsilon, config.privacy.noise_multiplier
    if engine is None:
        epsilon, multiplier = float("inf"), None
    adaptive = engine is not None and config.clip.policy == "adaptive"
    return make_plan(
        dataset_size=train_size,
        expected_batch_size=batch_size,
        steps=max(1, steps),
        delta=train_size**-1.1 if config.privacy.delta is None else config.privacy.delta,
        epsilon=epsilon if multiplier is None else None,
        noise_multiplier=multiplier,
        num_groups=1 if engine is None else len(engine.groups),
        quantile_budget=config.clip.quantile_budget if adaptive else 0.0,
        sampling=config.privacy.sampling,
        accountant=config.privacy.accountant,
    )


def _expected_batch_size(config: RunConfig, train_size: int) -> int:
    """B as it is given, or rho N."""
    if config.train.sample_rate is not None:
        return max(1, round(config.train.sample_rate * train_size))
    batch_size = config.train.batch_size
    assert batch_size is not None, "validate() asks for one of the two"
    if batch_size > train_size:
        raise UserError(
            f"train.batch_size={batch_size} is larger than the training data ({train_size} examples): make it smaller."
        )
    return batch_size


def _make_trainer(
    config: RunConfig,
    task: Task,
    engine: ClippingEngine | None,
    plan: PrivacyPlan,
    device: torch.device,
    state: dict[str, Any] | None,
) -> Trainer:
    if state is not None and state["plan"] != plan.to_dict():
        raise UserError(
            "The checkpoint was made under another privacy plan (other data, software or settings): bring those "
            "back, or start afresh with overwrite=true."
        )
    optimizer = make_optimizer(task.model.parameters(), config.optim)
    noise = _noise_source(config, plan, state)
    sampler: PoissonSampler | ShuffleSampler
    if plan.sampling == "poisson":
        sampler = PoissonSampler(plan.dataset_size, plan.sample_rate, noise.derive("sampling"))
    else:
        sampler = ShuffleSampler(plan.dataset_size, round(plan.expected_batch_size), noise.derive("sampling"))
    microbatch = config.train.microbatch
    if microbatch is None and state is None:
        microbatch = choose_microbatch(task.losses, task.model, device, task.order(np.arange(task.train_size)))
    return Trainer(
        task=task,
        engine=engine,
        thresholds=None if engine is None else make_thresholds(config.clip, plan),
        plan=plan,
        sampler=sampler,
        noise=noise,
        allocation=config.noise.allocation,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config.optim, plan.steps),
        microbatch=microbatch or 1,
        device=device,
    )


def _noise_source(config: RunConfig, plan: PrivacyPlan, state: dict[str, Any] | None) -> NoiseSource:
    """The checkpoint's key, so that replayed steps repeat their noise; else entropy, or a seed (no secret)."""
    if state is not None:
        return NoiseSource.from_key(state["noise_key"], state["noise_is_secret"])
    if config.debug.noise_seed is not None:
        return NoiseSource.from_seed(config.debug.noise_seed)
    return NoiseSource.fresh() if plan.noise_multiplier > 0 else NoiseSource.from_seed(config.seed)
