"""The loop body: one logical batch, one private release, one update (Algorithm 1)."""

from dataclasses import dataclass, field
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
)
from groupwise.training.task import Task


@dataclass
class Trainer:
    """Everything that one step reads or changes; `state_dict` and the step number are all that a resumed run needs."""

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
    _loss: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._trainable = [p for p in self.task.model.parameters() if p.requires_grad]

    def step(self, step: int) -> dict[str, float]:
        """Run step `step` (0-based) and return what it may log; what is no private release is `nonprivate/`."""
        examples = self.task.order(self.sampler.indices(step))
        if self.engine is not None and self.thresholds is not None:
            self.engine.set_thresholds(self.thresholds.clip_thresholds, self.thresholds.count_thresholds)
        self._accumulate(examples)
        noise_norm = self._release(step)
        rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.task.check_update(step)
        return {"learning_rate": rate, **noise_norm, **self._report(examples, step)}

    def _accumulate(self, examples: np.ndarray) -> None:
        """Sum the clipped gradients of the logical batch, as many examples at a time as fit."""
        while True:
            self._clear()
            try:
                for start in range(0, len(examples), self.microbatch):
                    self._backward(examples[start : start + self.microbatch])
                return
            except torch.cuda.OutOfMemoryError:
                if self.microbatch == 1:
                    raise UserError(
                        "One example does not fit into the GPU's memory: use a smaller model or batch."
                    ) from None
            self._clear()
            torch.cuda.empty_cache()
            self.microbatch //= 2

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
            noise=self.noise,
            step=step,
        )
        sizes = torch.tensor([sum(p.numel() for p in group.parameters) for group in self.engine.groups])
        return {"noise_norm": float((stds.square() * sizes).sum().sqrt()) / batch_size}

    def _report(self, examples: np.ndarray, step: int) -> dict[str, float]:
        """Update the thresholds from the counts, last; and say what happened."""
        drawn = len(examples)
        report = {"nonprivate/batch_size": float(drawn), "nonprivate/loss": float(self._loss) / max(drawn, 1)}
        if self.engine is not None and self.thresholds is not None:
            counts = self.engine.counts
            self.thresholds.update(counts, drawn, self.noise, step)
            report["nonprivate/clipped"] = 1.0 - float(counts.mean()) / max(drawn, 1)
            report["nonprivate/nonfinite"] = float(self.engine.nonfinite)
        return report

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on."""
        state = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "thresholds": {} if self.thresholds is None else self.thresholds.state_dict(),
            "microbatch": self.microbatch,
            "random": torch.get_rng_state(),
            "noise_key": self.noise.key,
            "noise_is_secret": self.noise.is_secret,
            "plan": self.plan.to_dict(),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
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
        torch.set_rng_state(state["random"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self.device)
