"""Two worlds of a real task: its model, data, loss and dropout in the run's own trainer, with one example or without.

All examples are in one release, which is played again and again from the same weights, each time with fresh noise and
masks. The attacker knows everything but those: he chooses the example that adds most, and looks along its clipped
gradient in the mean over masks of his own ("worlds"). Or he deals masks from the public seed, in
both worlds, and looks along the difference ("masks"): a run that dealt them so itself would give itself away.

How tight it is: with p plays a world no bound exceeds about log(p/2 / 3.7), at 95 % (p = 500: 4.2), and one that is
Gaussian is some way below ε even where the example adds all that it may. Gradients alone are read, no counts.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from groupwise.audit.options import Setting, set_rate
from groupwise.audit.task import Present
from groupwise.audit.two_worlds import Distinguished, Release, TrainerWorld, distinguish
from groupwise.audit.watch import MASKS, stds_of
from groupwise.config import DebugConfig
from groupwise.errors import UserError
from groupwise.launch.making import make_trainer
from groupwise.launch.run import plan_run
from groupwise.privacy import PrivacyPlan
from groupwise.tasks import make_task
from groupwise.training.clipping import make_engine
from groupwise.training.loop import Trainer
from groupwise.training.ranks import Alone


def play_worlds(setting: Setting) -> tuple[PrivacyPlan, Distinguished, float]:
    """The plan, how far the worlds were told apart, and `Finding.share`.

    Raises:
        UserError: what `make_task` and `make_trainer` refuse; a task of fewer than two examples.
    """
    trainer, other = (_trainer(setting, 2 * setting.seed + world) for world in (0, 1))
    if trainer.task.train_size < 2:
        raise UserError("An audit needs an example, and another one beside it: give data.train_limit=2 or more.")
    public = setting.design == "masks"
    stds = _by_entry(trainer)
    canary = int(_everybody(trainer)[0]) if public else _loudest(trainer, stds)
    own = _mean_gradient(trainer, canary)
    direction = (_public_difference(trainer, canary, setting.config.seed) if public else own) / stds.square()
    without, having = (_world(made, direction, kept) for made, kept in ((trainer, canary), (other, None)))
    told = distinguish(without, having, setting.plays, trainer.plan.delta, setting.confidence)
    share = float((own / stds).norm()) * trainer.plan.gradient_noise_multiplier
    return trainer.plan, told, share


def _trainer(setting: Setting, noise_seed: int) -> Trainer:
    """As a run makes it; both worlds have the same weights, and each its own noise and masks."""
    config = replace(setting.config, debug=DebugConfig(noise_seed=noise_seed))
    cpu = torch.device("cpu")
    task = make_task(config, cpu)
    engine = make_engine(task.model, config.clip)
    assert engine is not None, "options refuses clip=none"
    plan = plan_run(config, task.train_size, len(engine.groups))
    set_rate(config, plan.expected_batch_size)
    return make_trainer(config, task, engine, plan, cpu, Alone(), None)


def _world(trainer: Trainer, direction: Tensor, absent: int | None) -> TrainerWorld:
    present = np.ones(trainer.task.train_size, dtype=bool)
    if absent is not None:
        present[absent] = False
    trainer.sampler = Present(trainer.sampler, present)  # type: ignore[assignment]

    def along(releases: list[Release]) -> float:
        return float(releases[0].update @ direction)

    return TrainerWorld([trainer], 1, along)  # type: ignore[arg-type]


def _everybody(trainer: Trainer) -> np.ndarray:
    """All examples in the order of a step."""
    return trainer.task.order(np.arange(trainer.task.train_size))


def _loudest(trainer: Trainer, stds: Tensor) -> int:
    """The example that adds most, in stds of the noise, under one draw of masks."""
    lengths = [float((_clipped_sum(trainer, np.array([i])) / stds).norm()) for i in range(trainer.task.train_size)]
    return int(np.argmax(lengths))


def _mean_gradient(trainer: Trainer, canary: int) -> Tensor:
    """An example's clipped gradient (P,), in the mean over masks that the attacker draws."""
    return torch.stack([_clipped_sum(trainer, np.array([canary])) for _ in range(4 * MASKS)]).mean(0)


def _public_difference(trainer: Trainer, canary: int, seed: int) -> Tensor:
    """By how much the clipped sum (P,) would move if masks were dealt from the public seed."""
    sums = []
    everybody = _everybody(trainer)
    for examples in (everybody, everybody[everybody != canary]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sums.append(_clipped_sum(trainer, examples))
    return sums[0] - sums[1]


def _clipped_sum(trainer: Trainer, examples: np.ndarray) -> Tensor:
    """Of these examples, (P,) float64, parameters in the model's order, with masks of the default generator."""
    engine, thresholds = trainer.engine, trainer.thresholds
    assert engine is not None and thresholds is not None
    engine.set_thresholds(thresholds.clip_thresholds, thresholds.count_thresholds)
    trainer.optimizer.zero_grad(set_to_none=True)
    engine.reset()
    for start in range(0, len(examples), trainer.microbatch):
        engine.backward(trainer.task.losses(examples[start : start + trainer.microbatch]))
    sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.task.model.parameters()]
    return torch.cat([own.flatten() for own in sums]).double()


def _by_entry(trainer: Trainer) -> Tensor:
    """The noise's std on every entry of the sum, (P,); infinite where nothing is released."""
    assert trainer.engine is not None
    stds = {
        id(p): std for group, std in zip(trainer.engine.groups, stds_of(trainer), strict=True) for p in group.parameters
    }
    parameters = trainer.task.model.parameters()
    return torch.cat([torch.full((p.numel(),), stds.get(id(p), float("inf")), dtype=torch.float64) for p in parameters])
