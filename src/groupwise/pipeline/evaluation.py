"""Evaluates a task's own metrics of a model in stages: forward passes one after the other, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.pipeline.communication import Line, evaluating
from groupwise.pipeline.generate import generate_on_stages
from groupwise.pipeline.split import Stage
from groupwise.training.task import Feed, Microbatch, Split


@runtime_checkable
class Staged(Protocol):
    """A task whose model can be in stages: `tasks.TextGeneration` and `tasks.ImageClassification`."""

    def feed(self, split: Split, device: torch.device) -> Feed:
        """Makes the microbatches of a split."""

    def metrics(
        self, split: Split, rows: np.ndarray, outcomes: Tensor, write: Callable[..., list[str]] | None = None
    ) -> dict[str, float]:
        """Metrics from `Stage.outcomes` of these rows (n,) of a split, (n, ...); a final evaluation writes texts."""


def evaluate_pipeline(
    task: Staged,
    stage: Stage,
    split: Split,
    batch_size: int,
    limit: int | None = None,
    final: bool = False,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """What the task's `evaluate` returns with the whole model; every process calls it alike and gets the metrics.

    A final evaluation leaves the texts in the task's `outputs`, also on every process.

    Args:
        task: for its data and its metrics; its own model is not asked.
        stage: the piece of the model that this process hosts.
        split, batch_size, limit, final: as `evaluate` takes them.
        device: of this process.
        group: the processes of the pipeline, in the order of the stages; None takes all.
    """
    feed = task.feed(split, device)
    rows = feed.order(np.arange(min(limit or len(feed), len(feed))))
    parts = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    outcomes = evaluate_outcomes(stage, (feed.microbatches(part, len(part))[0] for part in parts), device, group)
    write = partial(generate_on_stages, stage, device=device, group=group) if final else None
    return task.metrics(split, rows, outcomes, write)


def evaluate_outcomes(
    stage: Stage,
    microbatches: Iterable[Microbatch],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`Stage.outcomes` of all examples on every process, in order and without fillers, on the CPU: (n, ...).

    The microbatches may differ in shape. A stage begins with the next one when it has given one on.
    """
    line, found = Line(stage, device, group), []
    with evaluating(stage):
        for microbatch in microbatches:
            reads: dict[str, Any] = {name: microbatch.kwargs[name] for name in stage.reads if name in microbatch.kwargs}
            hidden = line.through(microbatch.first, **reads)
            if hidden is not None:
                found.append(stage.outcomes(hidden, microbatch.kwargs)[: microbatch.examples - microbatch.absent].cpu())
    return line.told(torch.cat(found) if stage.last else None)
