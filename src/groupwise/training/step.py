"""Takes the steps of a run: private steps on the examples of a task, with schedule, metrics and checkpoints.

Each of several replicas takes its share of the batch. Gradients and counts are summed over them once per batch, before
the noise. All have the same key, so they add the same noise and stay equal bit for bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.training.checkpoint import previous, save_checkpoint
from groupwise.training.memory import halve_on_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import Split, Task


class WeightAverage:
    """The exponential moving average of trainable parameters, as De et al. (2022) evaluate it.

    After step t (from 0) the average moves towards the weights by 1 - min(decay, (1 + t) / (10 + t)), so the first
    steps weigh no more than they should. It is computed from released weights alone and costs no privacy.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._decay = decay
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, to the bit."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> list[Tensor]:
        """The averages, in the order of the parameters."""
        return list(self._average)

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        for average, value in zip(self._average, state, strict=True):
            average.copy_(value)


@dataclass
class Trainer:
    """A task and the private step that trains it; a run resumes from its `state_dict`.

    All processes of a run (replicas, stages of a pipeline) call the same methods at the same time.
    """

    task: Task
    private: PrivateStep
    schedule: torch.optim.lr_scheduler.LRScheduler
    average: WeightAverage | None = None
    """The average of the weights that is evaluated and saved in place of the last ones; None without one."""
    _known: dict[str, float] = field(init=False, default_factory=dict)

    def step(self, step: int) -> list[float]:
        """Run step `step` (0-based); returns this process's part of what `report` takes."""
        rate = float(self.schedule.get_last_lr()[0])
        released = self.private.step()
        self.schedule.step()
        if self.average is not None:
            self.average.update(step)
        self._known = {"learning_rate": rate, "nonprivate/batch_size": float(released.drawn)}
        if released.noise_norm is None:
            return [released.loss]
        self._known["noise_norm"] = released.noise_norm
        self._known["nonprivate/clipped"] = 1.0 - float(released.counts.mean()) / max(released.drawn, 1)
        return [released.loss, float(released.nonfinite)]

    def report(self, totals: list[float]) -> dict[str, float]:
        """Metrics of the last step, from the sums over all processes; `nonprivate/` has those that are no release."""
        loss = totals[0] / max(self._known["nonprivate/batch_size"], 1)
        return {**self._known, "nonprivate/loss": loss} | ({"nonprivate/nonfinite": totals[1]} if totals[1:] else {})

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on."""
        return self.private.state_dict() | ({} if self.average is None else {"average": self.average.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken (noise and plan are the caller's)."""
        self.private.load_state_dict(state)
        self.schedule.last_epoch = state["step"]
        self.schedule._last_lr = [group["lr"] for group in self.private.optimizer.param_groups]
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    # -- evaluation and files: every process calls these, and the main one writes ----------------------------------

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """The task's own metrics; each replica computes them for itself.

        `batch_size` is halved where memory runs out, unless there are other processes.
        """
        with self._averaged():
            return halve_on_oom(batch_size, lambda size: self.task.evaluate(split, size, limit, final=final))

    def named_thresholds(self) -> dict[str, float]:
        """Group -> C_k; {} unclipped."""
        return self.private.named_thresholds()

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint, with the main process's `extra`, and keep the one before it."""
        state = self.state_dict()
        if self.private.ranks.main:
            save_checkpoint(path, {**state, **extra}, keep=previous(path))
        self.private.ranks.barrier()  # a process that ended meanwhile would end the run

    def save_model(self, path: Path) -> None:
        """Write the weights alone."""
        with self._averaged():
            state = self.private.weights()
            if self.private.ranks.main:
                save_checkpoint(path, state)

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.applied()

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs, on the main process."""
        with self._averaged():
            self.task.export(folder, provenance)
        print(f"Exported: {folder}")

    def machine(self) -> dict[str, Any]:
        """Columns of the result row about the machines of all processes."""
        return {}
