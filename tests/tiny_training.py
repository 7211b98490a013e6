"""A minimal training: tasks without evaluation, a sampler of given batches, and a trainer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import NoiseSource, PrivacyPlan, make_plan
from groupwise.training.from_config import make_engine, make_optimizer, make_schedule, make_thresholds
from groupwise.training.microbatches import TaskSums
from groupwise.training.private_step import PrivateStep
from groupwise.training.step import Trainer
from groupwise.training.task import Task

FLAT = ClipConfig("flat", grouping="flat", policy="fixed", threshold=0.5, rescale=False)
GHOST = ClipConfig("ghost", grouping="flat", norms="ghost", policy="fixed", threshold=0.5, rescale=False)
ADAPTIVE_LAYER = ClipConfig(threshold=0.5, quantile_budget=0.1)
ADAPTIVE_FLAT = ClipConfig("adaptive_flat", grouping="flat", threshold=0.5, rescale=False)
ADAPTIVE_BLOCK = ClipConfig("adaptive_block", grouping="block", threshold=0.5)
FIXED_LAYER = ClipConfig("fixed_layer", policy="fixed", threshold=0.5)
NONE = ClipConfig("none", grouping="none", policy="fixed")


class Trained(Task):
    """A task that is trained and not evaluated."""

    def read(self, examples: Any, even: bool = False) -> Any:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def evaluate(self, split: Any, batch_size: int, limit: int | None = None, final: bool = False) -> dict[str, float]:
        return {}

    def describe_data(self) -> dict[str, Any]:
        return {}


class Points(Trained):
    """Random points of three classes, for a network of five inputs; all in float64."""

    def __init__(self, model: nn.Module, examples: int) -> None:
        self.model, self.train_size = model.double(), examples
        self.x, self.y = torch.randn(examples, 5).double(), torch.randint(0, 3, (examples,))

    def read(self, examples: Any, even: bool = False) -> Any:
        rows = torch.as_tensor(np.asarray(examples))
        return self.x[rows], self.y[rows]

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Batches:
    """A sampler that repeats the given batches."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self.batches = batches

    def indices(self, step: int) -> np.ndarray:
        return np.array(self.batches[step % len(self.batches)], dtype=np.int64)


def plan_of(
    engine: ClippingEngine | None, clip: ClipConfig, examples: int, batch_size: float, steps: int, sigma: float
) -> PrivacyPlan:
    """The plan of a training; without an engine it has no noise."""
    return make_plan(
        dataset_size=examples,
        expected_batch_size=batch_size,
        steps=steps,
        delta=1e-5,
        noise_multiplier=0.0 if engine is None else sigma,
        num_groups=1 if engine is None else len(engine.groups),
        quantile_budget=clip.quantile_budget if clip.policy == "adaptive" else 0.0,
        accountant="rdp",
    )


def trainer_of(
    task: Any,
    clip: ClipConfig,
    optim: OptimConfig,
    *,
    batch_size: float,
    steps: int,
    sigma: float = 1.0,
    microbatch: int = 64,
    noise: NoiseSource | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Trainer:
    """A trainer as `run.py` makes it, without the check; by default its noise is seeded."""
    engine = make_engine(task.model, clip)
    if engine is not None:
        engine.trace(task.losses_of, range(min(6, task.train_size)))
    plan = plan_of(engine, clip, task.train_size, batch_size, steps, sigma)
    optimizer = make_optimizer(task.model.parameters(), optim)
    private = PrivateStep(
        model=task.model,
        engine=engine,
        thresholds=None if engine is None else make_thresholds(clip, plan),
        plan=plan,
        noise=noise or NoiseSource.from_seed(7),
        allocation="global",
        optimizer=optimizer,
        device=device,
        sums=TaskSums(task, microbatch),
    )
    return Trainer(task, private, make_schedule(optimizer, optim, steps))
