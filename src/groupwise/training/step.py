"""Takes one step: one logical batch, one private release, one update (Algorithm 1).

With several replicas (`ranks`) each takes its share of the batch, and gradients and counts are summed over them once a
logical batch, before the noise; all hold the run's key and so add the very same noise, and stay equal bit for bit. That
explicit sum is what DistributedDataParallel with `no_sync` would do, and a replica may have any number of microbatches.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from groupwise.privacy import (
    AdaptiveThresholds,
    FixedThresholds,
    NoiseSource,
    PoissonSampler,
    PrivacyPlan,
    ShuffleSampler,
    release_gradients,
    secret_randomness,
)
from groupwise.training.checkpoint import previous, save_checkpoint
from groupwise.training.memory import ran_out
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.task import Split, Task


@dataclass
class Trainer:
    """Everything that one step reads or changes; `state_dict` and the step number are all that a resumed run needs.

    It is a `groupwise.training.train.AnyTrainer`: with replicas, all of them call the same methods at the same time.
    """

    task: Task
    engine: ClippingEngine | None
    thresholds: FixedThresholds | AdaptiveThresholds | None
    plan: PrivacyPlan
    sampler: PoissonSampler | ShuffleSampler
    noise: NoiseSource
    allocation: str
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    microbatch: int
    device: torch.device
    ranks: Alone | Ranks = field(default_factory=Alone)
    _loss: torch.Tensor = field(init=False)
    _known: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._trainable = [p for p in self.task.model.parameters() if p.requires_grad]
        self._gradient_noise = self._count_noise = self.noise

    def step(self, step: int) -> list[float]:
        """Run step `step` (0-based); returns this process's part of what `report` takes."""
        examples = self.task.order(self.sampler.indices(step))
        if self.engine is not None and self.thresholds is not None:
            self.engine.set_thresholds(self.thresholds.clip_thresholds, self.thresholds.count_thresholds)
        self._accumulate(examples, step)
        counts = self._sum_over_replicas()
        noise_norm = self._release(step)
        rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self._check_update(step)
        self._known = {"learning_rate": rate, **noise_norm, "nonprivate/batch_size": float(len(examples))}
        if self.engine is None or self.thresholds is None:
            return [float(self._loss)]
        self.thresholds.update(counts, len(examples), self._count_noise, step)  # last: noise took those that clipped
        self._known["nonprivate/clipped"] = 1.0 - float(counts.mean()) / max(len(examples), 1)
        return [float(self._loss), float(self.engine.nonfinite)]

    def report(self, totals: list[float]) -> dict[str, float]:
        """What the last step may log, from the sums over all processes; what is no private release is `nonprivate/`."""
        loss = totals[0] / max(self._known["nonprivate/batch_size"], 1)
        return {**self._known, "nonprivate/loss": loss} | ({"nonprivate/nonfinite": totals[1]} if totals[1:] else {})

    def _accumulate(self, examples: np.ndarray, step: int) -> None:
        """Sum the clipped gradients of this replica's share of the batch, as many examples at a time as fit.

        Where memory runs out, the same examples are begun again with half as many at a time; nothing has been released
        yet, and the step's noise is what it would have been.
        """
        share = self.ranks.share(examples)
        while True:
            try:
                self._clear()
                for start in range(0, len(share), self.microbatch):
                    with self._randomness(step, start):
                        self._backward(share[start : start + self.microbatch])
                return
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                if self.microbatch == 1:
                    raise UserError("One example does not fit into memory: use a smaller model.") from None
            if self.device.type == "cuda":
                self._clear()
                torch.cuda.empty_cache()  # pieces that halves do not fit into
            self.microbatch //= 2
            print(f"warning: memory ran out; going on with {self.microbatch} examples at once.", file=sys.stderr)

    def _randomness(self, step: int, start: int) -> AbstractContextManager[None]:
        """Masks of the microbatch that begins at `start` in this process's share: secret, and nobody else's."""
        process = self.ranks.replica * self.ranks.stages + self.ranks.stage
        return secret_randomness(self.noise, step, start, process=process, device=self.device)

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.engine is not None:
            self.engine.reset()

    def _backward(self, examples: np.ndarray) -> None:
        losses = self.task.losses(examples)
        if self.engine is None:
            losses.sum().backward()
        else:
            self.engine.backward(losses)
        self._loss += losses.detach().sum()

    def _sum_over_replicas(self) -> torch.Tensor:
        """Gradient sums become those of the whole batch, in place; returns its counts, (K,), or (0,) unclipped."""
        counts = torch.zeros(0) if self.engine is None else self.engine.counts
        if self.ranks.replicas > 1:
            on_device = counts.to(self.device)
            self.ranks.sum_([*self._own_sums(), *([on_device] if len(counts) else [])])
            counts = on_device.cpu()
        return counts

    def _own_sums(self) -> list[torch.Tensor]:
        """Gradients that hold this replica's share alone; those of an empty share are zeros."""
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._trainable if parameter.grad is not None]

    def _release(self, step: int) -> dict[str, float]:
        """Noise once for the logical batch, with the thresholds that clipped, then divide by the configured B."""
        batch_size = self.plan.expected_batch_size
        if self.engine is None or self.thresholds is None:
            for parameter in self._trainable:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(batch_size)
            return {}
        stds = release_gradients(
            [group.parameters for group in self.engine.groups],
            self.thresholds.clip_thresholds,
            allocation=self.allocation,
            noise_multiplier=self.plan.gradient_noise_multiplier,
            expected_batch_size=batch_size,
            noise=self._gradient_noise,
            step=step,
            groups_elsewhere=self.plan.num_groups - len(self.engine.groups),
        )
        sizes = torch.tensor([sum(p.numel() for p in group.parameters) for group in self.engine.groups])
        return {"noise_norm": float((stds.square() * sizes).sum().sqrt()) / batch_size}

    def _check_update(self, step: int) -> None:
        self.task.check_update(step)

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on."""
        state = {
            "model": self._model_state(),
            "optimizer": self.optimizer.state_dict(),
            "thresholds": {} if self.thresholds is None else self.thresholds.state_dict(),
            "microbatch": self.microbatch,
            "noise_key": self.noise.key,
            "noise_is_secret": self.noise.is_secret,
            "plan": self.plan.to_dict(),
        }
        return state

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go back to where `state_dict` was taken, after `step` steps (noise and plan are the caller's)."""
        self.task.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.last_epoch = step
        self.schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        if self.thresholds is not None:
            self.thresholds.load_state_dict(state["thresholds"])
        self.microbatch = state["microbatch"]

    # -- what a session asks for beside steps: every process calls these, and the main one writes -----------------

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """The task's own metrics; replicas are equal, and each works them out for itself."""
        return self.task.evaluate(split, batch_size, limit, final=final)

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the last final evaluation made."""
        return self.task.outputs()

    def named_thresholds(self) -> dict[str, float]:
        """Group -> C_k; {} unclipped."""
        if self.engine is None or self.thresholds is None:
            return {}
        names = [group.name for group in self.engine.groups]
        return dict(zip(names, self.thresholds.clip_thresholds.tolist(), strict=True))

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint, with the main process's `extra`, and keep the one before it."""
        state = self.state_dict()
        if self.ranks.main:
            save_checkpoint(path, {**state, **extra}, keep=previous(path))

    def load(self, path: Path, state: dict[str, Any], step: int) -> None:
        """Go on after `step` steps, from `state`, which was read from `path`."""
        self.load_state_dict(state, step)

    def save_model(self, path: Path) -> None:
        """Write the weights alone."""
        state = self._model_state()
        if self.ranks.main:
            save_checkpoint(path, state)

    def _model_state(self) -> dict[str, Any]:
        return self.task.model.state_dict()

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs."""
        if self.ranks.main:
            self.task.export(folder, provenance)

    def machine(self) -> dict[str, Any]:
        """Nothing to add to what the row says of the main process's machine."""
        return {}
