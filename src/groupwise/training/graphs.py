"""Records the work of a microbatch as one CUDA graph for each shape, and launches it in the place of its kernels.

On a GPU the host of a small step is slower than the device: it starts a thousand kernels, layer by layer. A graph holds
the forward and the clipped backward pass of a microbatch and starts at once. What is recorded is the work of the
eager microbatch and none of the decisions that the host took: these follow from shapes and from the model, never from
values on the device, which a step reads once, after its last microbatch. Thresholds, weights, counts, gradients and
dropout's seed are read from memory at each launch, so one graph serves all steps.

What a model works out on the host would stand still, as would a tensor that is neither an input, a parameter nor a
buffer. When a shape is recorded, other losses for the same inputs and masks show a number that changes from call to
call; at the 1st, 2nd, 4th, 8th, … launch the losses are compared with those of an eager forward pass, which shows what
changed since. Both are refused.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from groupwise.clipping import ClippingEngine
from groupwise.clipping.unchanged import kept_buffers
from groupwise.errors import UserError, reason
from groupwise.training.memory import is_oom
from groupwise.training.plain import PLAIN
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import Task

WARM_UP = 2
"""Microbatches of a shape that run eagerly first: libraries choose kernels, and what is kept for a shape is made."""
MOST = 64
"""Graphs at once; microbatches of other shapes run eagerly. All take their memory from one pool."""

Inputs = dict[str, Any]
"""What a task's losses are computed from: tensors on the device, and plain arguments of the model."""


class Recorder(Protocol):
    """Records what runs on a device."""

    def running(self) -> AbstractContextManager[None]:
        """Inside, work is queued where it can be recorded, after what was queued outside and before what will be."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work once; what is returned does it again, on the same memory, without the host's part of it."""

    def forget(self) -> None:
        """Nothing that was recorded is launched any more."""


class CudaRecorder:
    """Records CUDA graphs on a stream of its own, which all work of the same gradients must be on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Recorder`."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`; while it is recorded nothing runs, so the graph is launched once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        graph.replay()
        return graph.replay

    def forget(self) -> None:
        """See `Recorder`; a pool that has lost its graphs takes no others."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class Recorded:
    """A microbatch's work, the memory that it reads, and where its losses and its groups' squared norms are."""

    inputs: Inputs
    launch: Callable[[], None]
    losses: Tensor
    squared_norms: dict[int, Tensor]
    launches: int = 0


class MicrobatchGraphs:
    """Adds the clipped sums of microbatches to the gradients, from the third of a shape on by a graph.

    Gradients should stay in their memory between steps (zeros take the place of what was released): a graph writes
    where they were, and where they are no more it is not used.

    Args:
        task: whose inputs are read here and whose losses are recorded.
        engine: attached to its model; None without clipping.
        recorder: of the device.
    """

    def __init__(self, task: Task, engine: ClippingEngine | None, recorder: Recorder) -> None:
        self._task, self._engine, self._recorder = task, engine, recorder
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def running(self) -> AbstractContextManager[None]:
        """All microbatches of a step run inside."""
        return self._recorder.running()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, private: PrivateStep, examples: np.ndarray) -> Tensor:
        """Clip the losses (n,) of these examples, or launch what did so for n others of the same shapes; returns them.

        Raises:
            UserError: the work cannot be recorded.
        """

        def add(inputs: Inputs) -> Tensor:
            def losses_of(some: Any) -> Tensor:
                given = inputs if some is examples else self._task.read(some, even=True)
                return self._task.losses(self._task.model, given)

            return private.clip(losses_of, examples)  # type: ignore[arg-type]  # an array is a sequence of numbers

        inputs = self._task.read(examples, even=True)
        key = self._key(inputs)
        if key is None:
            return add(inputs)
        if (known := self._recorded.get(key)) is not None:
            self._launch(known, inputs)
            if self._engine is not None:
                self._engine.squared_norms = known.squared_norms
                self._engine.repeated(len(examples))
        elif self._seen[key] < WARM_UP or len(self) >= MOST:
            self._seen[key] += 1
            return add(inputs)
        else:
            known = self._recorded[key] = self._record(inputs, add)
        return known.losses

    def _launch(self, known: Recorded, inputs: Inputs) -> None:
        """Do the work on these inputs; now and then its losses are compared with an eager forward pass.

        Raises:
            UserError: they are others, from the same inputs and masks.
        """
        for name, value in tensors(inputs).items():
            known.inputs[name].copy_(value)
        known.launches += 1
        power_of_two = known.launches & (known.launches - 1) == 0
        expected = self._losses_again(inputs) if power_of_two else None
        known.launch()
        if expected is not None and not torch.allclose(known.losses, expected, rtol=0.05, atol=1e-3, equal_nan=True):
            raise UserError(
                f"train.cuda_graph=true: at launch {known.launches} of a graph the losses are not those that the task "
                "computes now: something other than its inputs changed. Return it from read, or keep it in a buffer "
                "that is changed in place, or leave the option out."
            )

    def _key(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """What a graph holds for: shapes, plain arguments, masked rows, training mode, and where the model's tensors
        and their gradients lie; None as long as there are no gradients, or sparse ones.

        Raises:
            UserError: an input that is neither on the device nor plain.
        """
        model = self._task.model
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
        places = tuple(t.data_ptr() for t in (*gradients, *model.parameters(), *model.buffers()) if t is not None)
        modes = tuple(module.training for module in model.modules())
        return self._engine is not None and self._engine.masks_rows, shown, places, modes

    def _record(self, inputs: Inputs, add: Callable[[Inputs], Tensor]) -> Recorded:
        inputs = inputs | {name: value.clone() for name, value in tensors(inputs).items()}
        self._check_repeats(inputs)
        before, made = self._draws_of_the_host(), list[Tensor]()

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
        if self._draws_of_the_host() != before:
            raise UserError(
                "train.cuda_graph=true: this model draws random numbers on the host (layers that it leaves out, say), "
                "which would be the same ones at each launch: leave the option out."
            )
        return Recorded(inputs, launch, made[0], {} if self._engine is None else self._engine.squared_norms)

    def _losses_again(self, inputs: Inputs) -> Tensor:
        """The losses (n,) by a forward pass past the engine that leaves generators and buffers as they were.

        It is one with gradients, as attention without may draw other masks.
        """
        model = self._task.model
        device = next(model.parameters()).device
        drawn = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with kept_buffers(model), drawn, torch.enable_grad():
            return self._task.losses(model, inputs).detach()

    def _check_repeats(self, inputs: Inputs) -> None:
        """Refuse losses that are others when they are computed again from the same inputs, masks and buffers."""
        first, second = self._losses_again(inputs), self._losses_again(inputs)
        if not torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise UserError(
                "train.cuda_graph=true: this model has other losses for the same inputs and masks each time (a number "
                "or generator of its own on the host), which would stand still: leave the option out."
            )

    def _draws_of_the_host(self) -> list[Any]:
        """Where the generators stand that a graph does not draw from."""
        device = next(self._task.model.parameters()).device
        of_numpy = np.random.get_state()
        of_torch = torch.get_rng_state().tolist() if device.type != "cpu" else []
        return [random.getstate(), of_numpy[1].tolist(), of_numpy[2], of_torch]  # type: ignore[index]

    def forget(self) -> None:
        """Give the graphs and their memory back; microbatches warm up again."""
        self._recorded.clear()
        self._seen.clear()
        self._recorder.forget()


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Those of the inputs that are tensors, by name."""
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def recorder_of(device: torch.device) -> Recorder:
    """The recorder of a GPU; raises `UserError` on another device."""
    if device.type != "cuda":
        raise UserError(f"train.cuda_graph=true is for NVIDIA's GPUs, and this run is on {device.type}: leave it out.")
    return CudaRecorder(device)
