"""A run of run.py with its clock: rounds of the loop, and rounds of bare steps on the same examples between them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.meters import Seconds, Stopwatch
from groupwise import run as launch
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.training.from_config import autocast
from groupwise.training.step import Trainer
from groupwise.training.train import train


class Measured(Exception):
    """All rounds are done: leaves the run without its last evaluation."""


class Rounds:
    """Stands in for `Trainer.step`: stops the loop's clock between rounds, and times bare steps meanwhile.

    The first round warms up and does not count. A round of the loop goes from its first call to the next round's, so
    everything that the session does between its steps is in it.
    """

    def __init__(self, trainer: Trainer, config: RunConfig, rounds: int, steps: int) -> None:
        needed = (rounds + 1) * steps + 1
        if trainer.private.plan.steps < needed:
            raise UserError(
                f"The run has {trainer.private.plan.steps} steps, and {rounds} rounds of {steps} need {needed}: give "
                f"train.steps={needed}, or fewer rounds."
            )
        self.trainer, self.rounds, self.steps = trainer, rounds, steps
        self.pairs: list[tuple[Seconds, Seconds]] = []
        self._step = trainer.step
        self._bare = BareStep(trainer, config.train.precision)
        self._bare_seconds: Seconds | None = None
        self._watch: Stopwatch | None = None

    def step(self, step: int) -> list[float]:
        """One step of the loop; between two rounds, a round of bare steps first."""
        if step % self.steps == 0:
            if self._watch is not None and self._bare_seconds is not None:
                self.pairs.append((self._watch.read(self.steps), self._bare_seconds))
            if len(self.pairs) == self.rounds + 1:
                raise Measured
            self._bare_seconds = self._time_bare(range(step, step + self.steps))
            self._watch = Stopwatch(self.trainer.private.device)
        return self._step(step)

    def _time_bare(self, steps: Sequence[int]) -> Seconds:
        batches = [self._bare.load(self.trainer.private.sampler.indices(step)) for step in steps]
        self._run_bare(steps, batches)  # loading has moved memory and caches: steps after it are a few per cent slower
        watch = Stopwatch(self.trainer.private.device)
        self._run_bare(steps, batches)
        return watch.read(len(batches))

    def _run_bare(self, steps: Sequence[int], batches: list[list[Microbatch]]) -> None:
        for step, batch in zip(steps, batches, strict=True):
            self._bare.step(step, batch)


class _Terminal(io.StringIO):
    """A terminal that nobody looks at, so that the bar draws as it would on a real one."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


def measure(config: RunConfig, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Run `config` for as many rounds as asked and return one row a round.

    Raises:
        UserError: what `run.py` refuses; a run too short for the rounds; a compiled model.
    """
    if config.train.compile:
        raise UserError("train.compile=true cannot be compared with the bare step: leave it out.")
    found: list[Rounds] = []

    def session(config: RunConfig, record: Any, trainer: Trainer, state: dict[str, Any], *more: Any) -> dict[str, Any]:
        found.append(Rounds(trainer, config, rounds, steps))
        trainer.step = found[0].step  # type: ignore[method-assign]
        return train(config, record, trainer, state, *more)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(launch, "train", session),
        redirect_stdout(io.StringIO()),
        redirect_stderr(_Terminal()),
    ):
        config.paths.results, config.eval.every = folder, None
        with suppress(Measured):
            launch.run(config)
    trainer = found[0].trainer
    return [_row(config, trainer, number, steps, *pair) for number, pair in enumerate(found[0].pairs[1:])]


def _row(config: RunConfig, trainer: Trainer, number: int, steps: int, loop: Seconds, bare: Seconds) -> dict[str, Any]:
    cpu, wall = bare.cpu / loop.cpu, bare.wall / loop.wall
    return {
        "task": config.task,
        "scale": config.scale,
        "clip": config.clip.name,
        "parameters": sum(p.numel() for p in trainer.task.model.parameters()),
        "batch": config.train.batch_size,
        "microbatch": trainer.private.sums.size,
        "threads": torch.get_num_threads(),
        "device": trainer.private.device.type,
        "dtype": config.train.precision,
        "round": number,
        "steps": steps,
        "loop_cpu_seconds": loop.cpu,
        "bare_cpu_seconds": bare.cpu,
        "loop_wall_seconds": loop.wall,
        "bare_wall_seconds": bare.wall,
        "ratio": wall if trainer.private.device.type == "cuda" else cpu,
        "wall_ratio": wall,
    }


Microbatch = tuple[int, Any]
"""How many examples it has, and the batch that the task has read."""


class BareStep:
    """Steps of a `Trainer` without its loop: the same model, losses, engine, optimiser and microbatches."""

    def __init__(self, trainer: Trainer, precision: str) -> None:
        self._trainer = trainer
        self._precision = autocast(precision, trainer.private.device)
        self._noise = trainer.private.noise.child("bare steps")  # never the run's own key: its noise is used once

    def load(self, examples: np.ndarray) -> list[Microbatch]:
        """These examples as the task reads them, in the microbatches of the loop."""
        task, size = self._trainer.task, self._trainer.private.sums.size
        parts = [examples[start : start + size] for start in range(0, len(examples), size)]
        return [(len(part), task.read(part)) for part in parts]

    def step(self, step: int, batch: list[Microbatch]) -> None:
        """One update; thresholds stay where they are."""
        private = self._trainer.private
        private.clear()
        for microbatch in batch:
            self._backward(*microbatch)
        with patch.object(private, "gradient_noise", self._noise):
            private._release(step)
        private.optimizer.step()

    def _backward(self, examples: int, batch: Any) -> None:
        """One microbatch; a function of its own, so that nothing of it is alive in the next."""
        task, engine = self._trainer.task, self._trainer.private.engine
        with nullcontext() if engine is None else engine.forward(examples), self._precision():
            losses = task.losses(task.model, batch)
        if engine is None:
            losses.sum().backward()
        else:
            engine.backward(losses)
