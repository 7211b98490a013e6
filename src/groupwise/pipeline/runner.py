"""Runs the stage of one process on its replica's part of a logical batch, and clips (Algorithm 2).

torch's pipeline stage and its 1F1B schedule run the passes of all microbatches inside the engine's passes. All
microbatches of a step have one shape. torch gets it in advance, so it needs no extra pass to infer it. Torch's stage is
built again for each step, because the Poisson sample determines the shape and number of microbatches. Its buffers are
freed with it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from groupwise.pipeline.stage import Stage
from groupwise.training.task import Microbatch

Around = Callable[[int], AbstractContextManager[object]]
"""The number of a microbatch -> a context manager around its pass."""


class SteppedStage(PipelineStage):
    """torch's pipeline stage for one step.

    Args:
        microbatches: of the step; each stage reads the fields that it needs.
        held: how many microbatches are between their forward and backward passes at once. Torch makes a receive buffer
            for every microbatch of a step; here only so many are made, and used again.
        around: contexts around the forward and the backward pass of a microbatch.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: Sequence[Microbatch],
        held: int,
        around: tuple[Around, Around],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._microbatches, self._held = microbatches, held
        self._around_forward, self._around_backward = around
        super().__init__(
            stage,
            stage.index,
            stage.count,
            device,
            input_args=_received(stage, microbatches[0].first),
            output_args=_sent(stage, microbatches[0].first),
            group=group,
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward pass of one microbatch, with its own inputs."""
        microbatch = self._microbatches[fwd_chunk_id]
        with self._around_forward(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, (microbatch.first,), microbatch.kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one microbatch."""
        with self._around_backward(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(min(self._held, num_microbatches), has_backward)
        _repeat(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(min(self._held, num_microbatches))
        _repeat(self.grad_recv_info, num_microbatches)
        self.chunks = num_microbatches


def _repeat(buffers: dict[int, Any], count: int) -> None:
    """Give microbatch i the buffers of microbatch i - held, which has finished by then."""
    held = len(buffers)
    for i in range(held, count):
        buffers[i] = buffers[i - held]


def _received(stage: Stage, first: Tensor) -> Tensor:
    """A meta tensor like the stage's input: shape, dtype, and whether a gradient is sent back."""
    if stage.first:
        return torch.empty_like(first, device="meta")
    shape = stage.activation(len(first), first.shape[-1])
    return torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)


def _sent(stage: Stage, first: Tensor) -> Tensor:
    """A meta tensor like the stage's output, which for the last stage are the losses."""
    shape = (len(first),) if stage.last else stage.activation(len(first), first.shape[-1])
    return torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)


def held_at_once(stages: int, index: int, microbatches: int) -> int:
    """How many microbatches of stage s = `index` are between their two passes at once under 1F1B: at most S - s."""
    return min(microbatches, stages - index)


class StageRunner:
    """Runs one stage on the microbatches of a step; all processes of the pipeline call the same method together.

    Args:
        engine: attached to the stage; None clips nothing.
        group: the processes of the pipeline, in the order of the stages; None takes all.
    """

    def __init__(
        self, stage: Stage, engine: ClippingEngine | None, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.stage, self.engine, self.device, self.group = stage, engine, device, group
        if engine is None:
            return

        def check_once(_: Stage, __: Any, output: Tensor) -> None:
            """Check on the first output that requires a gradient that all parameters are clipped."""
            if output.requires_grad:
                engine.check_output(output)
                hook.remove()

        hook = stage.register_forward_hook(check_once)

    def run(self, microbatches: Sequence[Microbatch], randomness: Around) -> Tensor | None:
        """Add the stage's clipped sums over these examples to the parameters' .grad; no norms leave this device.

        Args:
            randomness: a context around both passes of a microbatch, which fixes its random numbers.

        Returns:
            On the last stage the examples' losses (n,), in order and without padding examples; None on the others.
        """
        engine = self.engine

        def clipped(i: int) -> AbstractContextManager[object]:
            return nullcontext() if engine is None else engine.backward_of(i, microbatches[i].absent)

        return self._pass(microbatches, clipped, randomness)

    def run_flat(self, microbatches: Sequence[Microbatch], randomness: Around) -> Tensor | None:
        """As `run`, but all stages are one group: two passes, and one all-reduce of the examples' squared norms.

        The first pass computes norms alone. Their sum over the stages is each example's norm, and gives its clip
        factor. The second pass repeats the first, with each layer's rows multiplied by the factors; `randomness`
        repeats the dropout masks.
        """
        engine = self.engine
        assert engine is not None and len(engine.groups) == 1, "flat clipping needs one group on each stage"
        found: list[Tensor] = []

        @contextmanager
        def norms(i: int) -> Iterator[None]:
            with engine.norms_of(i):
                yield
            found.append(engine.squared_norms[0])

        losses = self._pass(microbatches, norms, randomness)
        if not microbatches:
            return losses
        squares = torch.stack(found)  # (microbatches, b)
        dist.all_reduce(squares, group=self.group)
        engine.count_norms(_present(squares, microbatches).unsqueeze(0))
        factors = engine.factors(squares.flatten()).view_as(squares)
        kept = [
            replace(each, kwargs={**each.kwargs, "weights": each.kwargs["weights"] * (row != 0)})
            for each, row in zip(microbatches, factors, strict=True)
        ]

        def sums(i: int) -> AbstractContextManager[object]:
            return engine.sums_of(i, factors[i])

        self._pass(kept, sums, randomness)
        return losses

    def _pass(self, microbatches: Sequence[Microbatch], backward: Around, randomness: Around) -> Tensor | None:
        """Run all microbatches forward and backward; returns their losses (n,) on the last stage."""
        if not microbatches:
            return torch.zeros(0, device=self.device) if self.stage.last else None
        engine = self.engine

        def forward(i: int) -> AbstractContextManager[object]:
            return nullcontext() if engine is None else engine.forward(microbatches[i].examples, i)

        try:
            losses = self._stepped(microbatches, (_within(randomness, forward), _within(randomness, backward)))
        except RuntimeError as error:  # torch wraps errors of a pass
            mistake = _mistake(error, self.stage.index)
            if mistake is None:
                raise
            raise mistake from error
        return None if losses is None else _present(losses.detach().view(len(microbatches), -1), microbatches)

    def _stepped(self, microbatches: Sequence[Microbatch], around: tuple[Around, Around]) -> Tensor | None:
        count = len(microbatches)
        held = held_at_once(self.stage.count, self.stage.index, count)
        stage = SteppedStage(self.stage, microbatches, held, around, self.device, self.group)
        schedule = Schedule1F1B(stage, count, loss_fn=lambda losses, _: losses.sum(), scale_grads=False)
        return schedule.step(target=torch.empty(count))


def _within(outer: Around, inner: Around) -> Around:
    @contextmanager
    def both(i: int) -> Iterator[None]:
        with outer(i), inner(i):
            yield

    return both


def _present(rows: Tensor, microbatches: Sequence[Microbatch]) -> Tensor:
    """(microbatches, b) -> (n,): the rows of real examples, in order."""
    kept = [row[: len(row) - m.absent] for row, m in zip(rows, microbatches, strict=True)]
    return torch.cat(kept)


def _mistake(error: BaseException | None, stage: int) -> UserError | None:
    """The error of a pass, or its cause, as a `UserError`; None if the user cannot fix it."""
    if error is None or isinstance(error, UserError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(
            f"Stage {stage} ran out of its device's memory: lower train.microbatch, or give "
            "pipeline.rematerialize=true or more pipeline.stages."
        )
    return _mistake(error.__cause__, stage)
