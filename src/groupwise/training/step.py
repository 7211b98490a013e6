"""Takes the steps of a run: the task's losses, in microbatches, through the private mechanism (Algorithm 1).

With several replicas (`ranks`) each takes its share of the batch, and gradients and counts are summed over them once a
logical batch, before the noise; all hold the run's key and so add the very same noise, and stay equal bit for bit. That
explicit sum is what DistributedDataParallel with `no_sync` would do, and a replica may have any number of microbatches.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from groupwise.privacy import AdaptiveThresholds, EpsilonReport, FixedThresholds, NoiseSource, PrivacyPlan
from groupwise.training.checkpoint import previous, save_checkpoint
from groupwise.training.graphs import MicrobatchGraphs
from groupwise.training.mechanism import Mechanism
from groupwise.training.memory import in_halves, ran_out
from groupwise.training.ranks import Alone, Ranks
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
    """A task and the mechanism that trains it; `state_dict` and the step number are all that a resumed run needs.

    All processes of a run (replicas, stages of a pipeline) call the same methods at the same time.
    """

    task: Task
    mechanism: Mechanism
    schedule: torch.optim.lr_scheduler.LRScheduler
    microbatch: int
    average: WeightAverage | None = None
    """What is evaluated and saved in the place of the last weights, if anything."""
    graphs: MicrobatchGraphs | None = None
    """What microbatches are recorded with, if they are."""
    _loss: torch.Tensor = field(init=False)
    _known: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.mechanism.keeps_gradients = self.graphs is not None

    @property
    def engine(self) -> ClippingEngine | None:
        """What clips; None for plain training."""
        return self.mechanism.engine

    @property
    def thresholds(self) -> FixedThresholds | AdaptiveThresholds | None:
        """Those of the engine's groups."""
        return self.mechanism.thresholds

    @property
    def plan(self) -> PrivacyPlan:
        """What was promised."""
        return self.mechanism.plan

    def spent(self) -> EpsilonReport:
        """What the steps that were released cost, those before a resumption included."""
        return self.mechanism.spent()

    @property
    def noise(self) -> NoiseSource:
        """The run's source."""
        return self.mechanism.noise

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.mechanism.device

    @property
    def ranks(self) -> Alone | Ranks:
        """The processes of the run."""
        return self.mechanism.ranks

    def step(self, step: int) -> list[float]:
        """Run step `step` (0-based); returns this process's part of what `report` takes."""
        with nullcontext() if self.graphs is None else self.graphs.running():
            self._accumulate(self.task.order(self.mechanism.open(step)), step)
        rate = float(self.schedule.get_last_lr()[0])
        released = self.mechanism.close()
        self.schedule.step()
        self._check_update(step)
        if self.average is not None:
            self.average.update(step)
        self._known = {"learning_rate": rate, "nonprivate/batch_size": float(released.drawn)}
        if self.engine is None or released.noise_norm is None:
            return [float(self._loss)]
        self._known["noise_norm"] = released.noise_norm
        self._known["nonprivate/clipped"] = 1.0 - float(released.counts.mean()) / max(released.drawn, 1)
        return [float(self._loss), float(self.engine.nonfinite)]

    def report(self, totals: list[float]) -> dict[str, float]:
        """What the last step may log, from the sums over all processes; what is no private release is `nonprivate/`."""
        loss = totals[0] / max(self._known["nonprivate/batch_size"], 1)
        return {**self._known, "nonprivate/loss": loss} | ({"nonprivate/nonfinite": totals[1]} if totals[1:] else {})

    def _accumulate(self, examples: np.ndarray, step: int) -> None:
        """Sum the clipped gradients of this replica's share of the batch, as many examples at a time as fit.

        Where memory runs out, the same examples are begun again with half as many at a time, and where one of them has
        to be left out and rows were not masked, with masks; nothing has been released yet, and the step's noise is what
        it would have been.
        """
        share, masks = self.ranks.share(examples), self.engine is None or self.engine.masks_rows
        while True:
            try:
                self._clear()
                for start in range(0, len(share), self.microbatch):
                    with self.mechanism.microbatch(step, start):
                        self._backward(share[start : start + self.microbatch])
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
            else:
                if self.engine is None or not self.engine.spoiled:
                    break
                self.engine.masks_rows = True
                continue
            self._halve()  # once the error is gone, and what it held
        if self.engine is not None:
            self.engine.masks_rows = masks

    def _halve(self) -> None:
        """Go on with half as many examples at a time, since memory has run out.

        Raises:
            UserError: there is no less.
        """
        if self.microbatch == 1:
            raise UserError("One example does not fit into memory: use a smaller model.")
        if self.graphs is not None:
            self.graphs.forget()
        if self.device.type == "cuda":
            self._clear()
            torch.cuda.empty_cache()  # pieces that halves do not fit into
        self.microbatch //= 2
        print(f"warning: memory ran out; going on with {self.microbatch} examples at once.", file=sys.stderr)

    def _clear(self) -> None:
        self.mechanism.clear()
        self._loss.zero_()

    def _backward(self, examples: np.ndarray) -> None:
        if self.graphs is not None:
            self.graphs.run(examples, self._add)
        else:
            self._add(self.task.losses(examples))

    def _add(self, losses: Tensor) -> None:
        self.mechanism.backward(losses)
        self._loss += losses.detach().sum()

    def _check_update(self, step: int) -> None:
        self.task.check_update(step)

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on."""
        return {
            "model": self._model_state(),
            "optimizer": self.mechanism.optimizer.state_dict(),
            "microbatch": self.microbatch,
            **({} if self.average is None else {"average": self.average.state_dict()}),
            **self.mechanism.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go back to where `state_dict` was taken, after `step` steps (noise and plan are the caller's)."""
        optimizer = self.mechanism.optimizer
        self.task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.schedule.last_epoch = step
        self.schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
        self.mechanism.load_state_dict(state, step)
        self.microbatch = state["microbatch"]
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    # -- what a session asks for beside steps: every process calls these, and the main one writes -----------------

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """The task's own metrics; replicas are equal, and each works them out for itself.

        `batch_size` is halved where memory runs out, unless there are other processes.
        """
        with self._averaged():
            return in_halves(batch_size, lambda size: self.task.evaluate(split, size, limit, final=final))

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
        self.ranks.barrier()  # nobody leaves while it is being written: whoever watches would end all

    def load(self, path: Path, state: dict[str, Any], step: int) -> None:
        """Go on after `step` steps, from `state`, which was read from `path`."""
        self.load_state_dict(state, step)

    def save_model(self, path: Path) -> None:
        """Write the weights alone."""
        with self._averaged():
            state = self._model_state()
            if self.ranks.main:
                save_checkpoint(path, state)

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.applied()

    def _model_state(self) -> dict[str, Any]:
        return self.task.model.state_dict()

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the model for other programs."""
        if self.ranks.main:
            with self._averaged():
                self.task.export(folder, provenance)

    def machine(self) -> dict[str, Any]:
        """Nothing to add to what the row says of the main process's machine."""
        return {}
