"""Records the work of a microbatch as one CUDA graph for each shape, and launches it in the place of its kernels.

On a GPU the host of a small step is slower than the device: it starts a thousand kernels, layer by layer. A graph holds
the forward and the clipped backward pass of a microbatch and starts at once. What is recorded is the work of the
eager microbatch and none of the decisions that the host took: these follow from shapes and from the model, never from
values on the device, which a step reads once, after its last microbatch. Thresholds, weights, counts, gradients and
dropout's seed are read from memory at each launch, so one graph serves all steps.

What a model works out on the host would stand still, as would a tensor that is neither an input, a parameter nor a
buffer. At the 1st, 2nd, 4th, 8th, … launch the losses are compared with those of an eager forward pass on the same
inputs and masks, and other losses are refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.clipping import ClippingEngine
from groupwise.clipping.unchanged import kept_buffers
from groupwise.errors import UserError, reason
from groupwise.training.memory import is_oom
from groupwise.training.microbatches import TaskSums
from groupwise.training.plain import PLAIN
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import Task

WARM_UP = 2
"""Microbatches of a shape that run eagerly first, while libraries choose their kernels."""
MAX_GRAPHS = 64
"""Microbatches of further shapes run eagerly. All graphs share one pool of memory."""

Inputs = dict[str, Any]
"""Inputs of a task's losses: tensors on the device, and plain arguments of the model."""


class CudaRecorder:
    """Records CUDA graphs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, work runs on a stream that can be recorded, in order with the work outside."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work once; returns a function that does it again, on the same memory, without the host.

        Recording runs nothing, so the graph is launched once.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        graph.replay()
        return graph.replay

    def forget(self) -> None:
        """Give up what was recorded; a pool whose graphs are gone takes no others."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class Recorded:
    """A recorded microbatch: the memory that it reads, and where its losses and its groups' squared norms are."""

    inputs: Inputs
    launch: Callable[[], None]
    losses: Tensor
    squared_norms: dict[int, Tensor]
    launches: int = 0


class GraphSums(TaskSums):
    """Clipped sums of batches of a task, from the third microbatch of a shape on by a CUDA graph.

    Args:
        task: whose inputs are read and whose losses are recorded.
        size: examples at once, at most.
        recorder: of the device.
    """

    keeps_gradients = True

    def __init__(self, task: Task, size: int, recorder: CudaRecorder) -> None:
        super().__init__(task, size)
        self._recorder = recorder
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        """See `Microbatches`."""
        with self._recorder.running():
            return super().add(private, step, drawn)

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, filler: bool) -> Tensor:
        """See `Microbatches`.

        Raises:
            UserError: the work cannot be recorded.
        """

        def add(inputs: Inputs) -> Tensor:
            def losses_of(some: Any) -> Tensor:
                return self.task.losses(self.task.model, inputs if some is rows else self.task.read(some, even=True))

            return private.clip(losses_of, rows)  # type: ignore[arg-type]  # an array is a sequence of numbers

        engine, inputs = private.engine, self.task.read(rows, even=True)
        key = self._key(inputs, engine)
        if key is None:
            return add(inputs)
        if (known := self._recorded.get(key)) is not None:
            self._launch(known, inputs)
            if engine is not None:
                engine.squared_norms = known.squared_norms
                engine.repeated(len(rows))
        elif self._seen[key] < WARM_UP or len(self) >= MAX_GRAPHS:
            self._seen[key] += 1
            return add(inputs)
        else:
            losses, launch, inputs = self._record(inputs, add)
            known = Recorded(inputs, launch, losses, {} if engine is None else engine.squared_norms)
            self._recorded[key] = known
        return known.losses

    def forget(self) -> None:
        """Free the graphs and their memory; microbatches warm up again."""
        self._recorded.clear()
        self._seen.clear()
        self._recorder.forget()

    def _launch(self, known: Recorded, inputs: Inputs) -> None:
        """Launch a graph on these inputs; after 1, 2, 4, 8, … launches compare its losses with an eager forward pass.

        Raises:
            UserError: they differ, on the same inputs and masks.
        """
        for name, value in tensors(inputs).items():
            known.inputs[name].copy_(value)
        known.launches += 1
        power_of_two = known.launches & (known.launches - 1) == 0
        expected = self._eager_losses(inputs) if power_of_two else None
        known.launch()
        if expected is not None and not torch.allclose(known.losses, expected, rtol=0.05, atol=1e-3, equal_nan=True):
            raise UserError(
                f"train.cuda_graph=true: at launch {known.launches} of a graph the losses are not those that the task "
                "computes now: something other than its inputs changed. Return it from read, or keep it in a buffer "
                "that is changed in place, or leave the option out."
            )

    def _key(self, inputs: Inputs, engine: ClippingEngine | None) -> tuple[Any, ...] | None:
        """What a graph is valid for: shapes, plain arguments, masked rows, modes, and the addresses of the model's
        tensors and gradients; None while there are no gradients, or sparse ones.

        Raises:
            UserError: an input that is neither on the device nor plain.
        """
        model = self.task.model
        device = next(model.parameters()).device
        for name, value in inputs.items():
            if not (value.device == device if isinstance(value, Tensor) else isinstance(value, PLAIN)):
                raise UserError(
                    f"train.cuda_graph=true: read gives {name!r} as a {type(value).__name__} that is not on {device}, "
                    "which would stay what it was: give tensors on the device, or leave the option out."
                )
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        if any(gradient is None or gradient.layout != torch.strided for gradient in gradients):
            return None
        shown = tuple(
            (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, value)
            for name, value in inputs.items()
        )
        addresses = tuple(t.data_ptr() for t in (*gradients, *model.parameters(), *model.buffers()) if t is not None)
        modes = tuple(module.training for module in model.modules())
        return engine is not None and engine.masks_rows, shown, addresses, modes

    def _record(self, inputs: Inputs, add: Callable[[Inputs], Tensor]) -> tuple[Tensor, Callable[[], None], Inputs]:
        """The losses of a microbatch, what launches its graph, and the inputs that the graph reads."""
        inputs = inputs | {name: value.clone() for name, value in tensors(inputs).items()}
        made = list[Tensor]()

        def work() -> None:
            made[:] = [add(inputs)]

        try:
            launch = self._recorder.record(work)
        except RuntimeError as error:
            if is_oom(error):
                raise
            first: BaseException = error
            while first.__context__ is not None:  # the end of a recording fails too, and says less
                first = first.__context__
            raise UserError(
                "train.cuda_graph=true: this model, or what its inputs go through, waits for the GPU or copies to it "
                f"inside of a microbatch, which cannot be recorded ({reason(first)}): leave the option out."
            ) from error
        return made[0], launch, inputs

    def _eager_losses(self, inputs: Inputs) -> Tensor:
        """The losses (n,) by a forward pass past the engine that leaves generators and buffers as they were.

        It is one with gradients, as attention without may draw other masks.
        """
        model = self.task.model
        device = next(model.parameters()).device
        drawn = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with kept_buffers(model), drawn, torch.enable_grad():
            return self.task.losses(model, inputs).detach()


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that are tensors, by name."""
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder of a GPU; raises `UserError` on another device."""
    if device.type != "cuda":
        raise UserError(f"train.cuda_graph=true is for NVIDIA's GPUs, and this run is on {device.type}: leave it out.")
    return CudaRecorder(device)
