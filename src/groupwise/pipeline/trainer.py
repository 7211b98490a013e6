"""Training steps of one stage of a pipeline (Algorithm 2); see also `training.step`.

All stages draw the same batch from the run's key. Each clips the gradients of its own parameters, adds noise of
std_k = σ_new·√K·C_k from a generator of its own, and moves its own thresholds by its own noisy counts. No per-example
norms are exchanged. With `clip.grouping=flat` all stages are one group with one threshold, and exchange squared norms
once per logical batch.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.pipeline import checkpoint
from groupwise.pipeline.evaluation import StageLink, evaluate_pipeline
from groupwise.pipeline.runner import StageRunner
from groupwise.tasks.text_generation import TextGeneration
from groupwise.training.private_step import PrivateStep
from groupwise.training.provenance import peak_memory_bytes
from groupwise.training.step import Trainer
from groupwise.training.task import Feed, Split


class StageSums:
    """The clipped sums of drawn batches on one stage; see `groupwise.training.private_step.BatchSums`.

    Args:
        size: examples of a microbatch; the dropout masks depend on it.
        one_group: whether all stages together are one group (flat); otherwise each stage has groups of its own.
    """

    keeps_gradients = False

    def __init__(self, runner: StageRunner, feed: Feed, size: int, one_group: bool) -> None:
        self.runner, self.feed, self.size, self.one_group = runner, feed, size, one_group

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        """Run all microbatches of this replica's share through the pipeline, forward and backward."""
        private.clear()
        run = self.runner.run_flat if self.one_group and private.engine is not None else self.runner.run
        share = private.ranks.share(self.feed.order(drawn))
        microbatches = self.feed.microbatches(share, self.size, least=self.runner.stage.count)  # as 1F1B needs
        losses = run(microbatches, partial(private.microbatch, step))
        return torch.zeros(()) if losses is None else losses.sum()


@dataclass(kw_only=True)
class PipelineTrainer(Trainer):
    """The trainer of one stage, `task.model`, with `StageSums`; all processes call the same methods together.

    `thresholds` and `engine` are for the stage's own groups; `plan.num_groups` is K, over all stages.
    """

    def __post_init__(self) -> None:
        sums: Any = self.private.sums
        self.runner: StageRunner = sums.runner
        self.one_group: bool = sums.one_group
        # Independent of the noise of other stages, and the same in every replica.
        self.private.gradient_noise = self.private.noise.child(f"stage {self.runner.stage.index}")
        if not self.one_group:
            self.private.count_noise = self.private.gradient_noise

    def step(self, step: int) -> list[float]:
        """Run step `step` (0-based); returns this process's part of the sums that `report` takes."""
        parts = super().step(step)
        if self.private.engine is None:
            return parts
        loss, nonfinite = parts
        own = 1 if self.one_group else len(self.private.engine.groups)
        groups = own / (self.runner.stage.count if self.one_group else self.private.plan.num_groups)
        clipped = self._known["nonprivate/clipped"] * groups / self.private.ranks.replicas
        square = self._known["noise_norm"] ** 2 / self.private.ranks.replicas
        by_stage = [0.0] * self.runner.stage.count
        by_stage[self.runner.stage.index] = nonfinite
        return [loss, clipped, square, *by_stage]

    def report(self, totals: list[float]) -> dict[str, float]:
        """The last step's values for the log, of all stages, from the sums over all processes."""
        if self.private.engine is None:
            return super().report(totals)
        loss, clipped, square, *nonfinite = totals
        whole = {"noise_norm": math.sqrt(square), "nonprivate/clipped": clipped}
        return {**super().report([loss]), **whole, "nonprivate/nonfinite": max(nonfinite)}

    def state_dict(self) -> dict[str, Any]:
        """The state of the stage that the next step depends on, without frozen weights, which are loaded again."""
        state = super().state_dict()
        return {**state, "model": {name: state["model"][name] for name in self._kept()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        if state["model"].keys() != set(self._kept()):
            raise UserError("The checkpoint's model was split into other stages: start afresh with overwrite=true.")
        super().load_state_dict({**state, "model": self.task.model.state_dict() | state["model"]})

    def _kept(self) -> list[str]:
        frozen = {name for name, parameter in self.runner.stage.named_parameters() if not parameter.requires_grad}
        return [name for name in self.runner.stage.state_dict() if name not in frozen]

    # -- evaluation and checkpoints -------------------------------------------------------------------------------

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """The task's metrics, from forward passes of the pipeline; the same on every process."""
        assert isinstance(self.task, TextGeneration)
        link = StageLink(self.runner.stage, self.private.device, self.runner.group)
        return evaluate_pipeline(self.task, link, split, batch_size, limit, final)

    def named_thresholds(self) -> dict[str, float]:
        """Group -> C_k for all stages; if a stage is one group, that has the stage's name."""
        own = super().named_thresholds()
        if self.one_group or not own:
            return own
        stage = f"stage {self.runner.stage.index}"
        named = {stage if len(own) == 1 else f"{stage} {name}": value for name, value in own.items()}
        by_stage = self.private.ranks.gather(named)[: self.private.ranks.stages]
        return {name: value for of_one in by_stage for name, value in of_one.items()}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint, one file per stage, with `extra` of the main process."""
        own = self.state_dict()
        common = {
            name: own[name] for name in own if name in ("step", "plan", "microbatches") or name.startswith("noise_")
        }
        checkpoint.save(path, own, {**common, **extra}, self.private.ranks)

    def save_model(self, path: Path) -> None:
        """Write the weights, one file per stage; if the model is small, also as one file `path`."""
        checkpoint.save_weights(path, self.runner.stage.names, self.private.weights(), self.private.ranks)

    def machine(self) -> dict[str, Any]:
        """The peak memory of each process, in bytes."""
        return {"peak_memory_bytes_by_process": self.private.ranks.gather(peak_memory_bytes(self.private.device))}
