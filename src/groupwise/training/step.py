"""Takes the steps of a run: private steps on the examples of a task, with a schedule, metrics and checkpoints.

Each replica computes its share of the batch. Gradients and counts are summed over the replicas once per batch, before
the noise. All replicas have the same noise key, so they add the same noise and stay equal bit for bit.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from groupwise.training.checkpoint import previous, save_checkpoint
from groupwise.training.memory import halve_on_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import Split, Task, eval_mode


@dataclass
class Trainer:
    """A task and the private step that trains it. A run resumes from its `state_dict`.

    All processes of a run (replicas, pipeline stages) must call each method together.
    """

    task: Task
    private: PrivateStep
    schedule: torch.optim.lr_scheduler.LRScheduler
    _known: dict[str, float] = field(init=False, default_factory=dict)

    def step(self, step: int) -> list[float]:
        """Take step `step`, from 0; returns this process's values, which are summed over all processes for `report`."""
        rate = float(self.schedule.get_last_lr()[0])
        released = self.private.step()
        self.schedule.step()
        self._known = {"learning_rate": rate, "nonprivate/batch_size": float(released.drawn)}
        if released.noise_norm is None:
            return [released.loss]
        self._known["noise_norm"] = released.noise_norm
        unclipped = float(released.counts.mean()) / released.drawn if released.drawn else 1.0
        self._known["nonprivate/clipped"] = 1.0 - unclipped
        return [released.loss, float(released.nonfinite)]

    def report(self, totals: list[float]) -> dict[str, float]:
        """The metrics of the last step, from the sums over all processes; those without noise are `nonprivate/…`."""
        loss = totals[0] / max(self._known["nonprivate/batch_size"], 1)
        return {**self._known, "nonprivate/loss": loss} | ({"nonprivate/nonfinite": totals[1]} if totals[1:] else {})

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return self.private.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, except for the noise key and the plan, which the caller handles."""
        self.private.load_state_dict(state)
        self.schedule.last_epoch = state["step"]
        self.schedule._last_lr = [group["lr"] for group in self.private.optimizer.param_groups]

    # -- evaluation and files: every process calls these, and the main one writes ----------------------------------

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Metrics of the task (see `Task.evaluate`), which each replica computes for itself.

        If memory runs out, `batch_size` is halved, unless there are several processes.
        """
        with eval_mode(self.task.model), torch.no_grad():
            found = halve_on_oom(batch_size, lambda size: self.task.evaluate(split, size, limit, final=final))
        return {name: value.item() if hasattr(value, "item") else value for name, value in found.items()}

    def named_thresholds(self) -> dict[str, float]:
        """The thresholds C_k of the next step by group name; {} without clipping."""
        return self.private.named_thresholds()

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint with the main process's `extra`, and keep the checkpoint before it."""
        state = self.state_dict()
        if self.private.ranks.main:
            save_checkpoint(path, {**state, **extra}, keep=previous(path))
        self.private.ranks.barrier()  # a process that ends while the main one writes would end the run

    def save_model(self, path: Path) -> None:
        """Write only the weights."""
        state = self.private.weights()
        if self.private.ranks.main:
            save_checkpoint(path, state)

    def machine(self) -> dict[str, Any]:
        """Columns of the result row about the machines of all processes."""
        return {}
