"""Runs one process's stage on its part of a logical batch, clipped as it goes (Algorithm 2)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from groupwise.pipeline.split import Stage
from groupwise.pipeline.torch_stage import (
    Around,
    SteppedStage,
    check_schedule,
    held_at_once,
    least_microbatches,
    make_schedule,
)
from groupwise.training.task import Microbatch


class StageRunner:
    """Takes one stage through the microbatches of a step; all processes of the pipeline call the same method at once.

    With one stage it is a loop over the microbatches, and no other process is asked.

    Args:
        stage: the piece of the model that this process hosts.
        engine: attached to it; None clips nothing.
        device: of this process.
        schedule: 1f1b or gpipe.
        group: the processes of the pipeline, in the order of the stages; None takes all.

    Raises:
        UserError: a schedule that cannot clip.
    """

    def __init__(
        self,
        stage: Stage,
        engine: ClippingEngine | None,
        device: torch.device,
        schedule: str = "1f1b",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_schedule(schedule)
        self.stage, self.engine, self.device, self.schedule, self.group = stage, engine, device, schedule, group
        self.least = least_microbatches(schedule, stage.count)
        """How many microbatches a step must have at least; `Feed.microbatches` makes as many."""
        if engine is not None:
            self._prove(engine)

    def _prove(self, engine: ClippingEngine) -> None:
        """Look once, at the first output that carries a gradient, whether all parameters are clipped."""

        def look(_: Stage, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                engine.check_output(output)
                hook.remove()

        hook = self.stage.register_forward_hook(look)

    def run(self, microbatches: Sequence[Microbatch], randomness: Around) -> Tensor | None:
        """Add the stage's sums over these examples to the parameters' .grad, clipped on this device alone.

        Args:
            microbatches: of the step.
            randomness: is around both passes of a microbatch, and each time the same for the same one.

        Returns:
            On the last stage the examples' losses (n,), in order and without fillers; None on the others.
        """
        engine = self.engine
        if engine is None:
            return self._pass(microbatches, (_nothing, _nothing), randomness)

        def clipped(i: int) -> AbstractContextManager[object]:
            return engine.backward_of(i, microbatches[i].examples, microbatches[i].absent)

        return self._pass(microbatches, (engine.forward_of, clipped), randomness)

    def run_flat(self, microbatches: Sequence[Microbatch], randomness: Around) -> Tensor | None:
        """As `run`, but one group over all stages: two passes, and one all-reduce of the examples' squared norms.

        The first pass gets norms alone. Then all stages know every example's whole norm and so its factor, and the
        second pass has the losses multiplied by them. `randomness` makes dropout the same in both.
        """
        engine = self.engine
        assert engine is not None and len(engine.groups) == 1, "one group over all stages is one group on each"
        found: list[Tensor] = []

        @contextmanager
        def norms(i: int) -> Iterator[None]:
            with engine.norms_of(i, microbatches[i].examples):
                yield
            found.append(engine.squared_norms[0])

        losses = self._pass(microbatches, (engine.forward_of, norms), randomness)
        if not microbatches:
            return losses
        squares = torch.stack(found)  # (microbatches, b)
        if self.stage.count > 1:
            dist.all_reduce(squares, group=self.group)
        engine.count_norms(_present(squares, microbatches).unsqueeze(0))
        factors = engine.factors(squares.flatten()).view_as(squares)
        weighted = [_weigh(microbatch, row) for microbatch, row in zip(microbatches, factors, strict=True)]

        def sums(i: int) -> AbstractContextManager[object]:
            return engine.sums_of(i, weighted[i].examples, factors[i])

        self._pass(weighted, (engine.forward_of, sums), randomness)
        return losses

    def _pass(
        self, microbatches: Sequence[Microbatch], passes: tuple[Around, Around], randomness: Around
    ) -> Tensor | None:
        """All microbatches through the pipeline and back; on the last stage their losses (n,)."""
        if not microbatches:
            return torch.zeros(0, device=self.device) if self.stage.last else None
        around = (_within(randomness, passes[0]), _within(randomness, passes[1]))
        through = self._alone if self.stage.count == 1 else self._stepped
        try:
            losses = through(microbatches, around)
        except RuntimeError as error:  # torch wraps what went wrong inside a pass
            mistake = _mistake(error, self.stage.index)
            if mistake is None:
                raise
            raise mistake from error
        return None if losses is None else _present(losses.detach().view(len(microbatches), -1), microbatches)

    def _stepped(self, microbatches: Sequence[Microbatch], around: tuple[Around, Around]) -> Tensor | None:
        count = len(microbatches)
        held = held_at_once(self.schedule, self.stage.count, self.stage.index, count)
        stage = SteppedStage(self.stage, microbatches, held, around, self.device, self.group)
        return make_schedule(self.schedule, stage, count).step(target=torch.empty(count))

    def _alone(self, microbatches: Sequence[Microbatch], around: tuple[Around, Around]) -> Tensor:
        found = []
        for i, microbatch in enumerate(microbatches):
            with around[0](i):
                losses = self.stage(microbatch.first, **microbatch.kwargs)
            with around[1](i):
                losses.sum().backward()
            found.append(losses.detach())
        return torch.cat(found)


def _within(outer: Around, inner: Around) -> Around:
    @contextmanager
    def both(i: int) -> Iterator[None]:
        with outer(i), inner(i):
            yield

    return both


def _nothing(_: int) -> AbstractContextManager[object]:
    return nullcontext()


def _present(rows: Tensor, microbatches: Sequence[Microbatch]) -> Tensor:
    """(microbatches, b) -> (n,): the rows that are no fillers, in order."""
    kept = [row[: len(row) - m.absent] for row, m in zip(rows, microbatches, strict=True)]
    return torch.cat(kept)


def _weigh(microbatch: Microbatch, factors: Tensor) -> Microbatch:
    """The microbatch with its weights times factors (b,)."""
    return replace(microbatch, kwargs={**microbatch.kwargs, "weights": microbatch.kwargs["weights"] * factors})


def _mistake(error: BaseException, stage: int) -> UserError | None:
    """What the user can mend behind an error in a pass, if it is that."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    for cause in causes:
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, torch.OutOfMemoryError):
            return UserError(
                f"Stage {stage} ran out of its device's memory: lower train.microbatch, or give "
                "pipeline.rematerialize=true or more pipeline.stages."
            )
    return None
