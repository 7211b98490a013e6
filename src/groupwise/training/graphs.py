"""Captures the work of a microbatch as one CUDA graph per shape, and launches that instead of single kernels.

In a small step on a GPU the host is the bottleneck: it launches a thousand kernels, layer by layer. A graph has the
forward and the clipped backward pass of a microbatch, and takes one launch. Decisions of the host are not captured;
they depend on shapes and on the model, not on values on the device, which a step reads once, after its last microbatch.
Thresholds, weights, counts, gradients and the dropout seed are read from memory at each launch, so one graph serves all
steps. Drawn batches have many sizes, so microbatches are padded to one of a few sizes (`Microbatches.split`) with
filler rows, whose losses are multiplied by 0.

A value that the model computes on the host would stay constant, as would a tensor that is not an input, parameter or
buffer. So at the 1st, 2nd, 4th, 8th, … launch the losses are compared with those of an eager forward pass on the same
inputs and masks, and a difference raises an error.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from groupwise.clipping import ClippingEngine
from groupwise.clipping.unchanged import kept_buffers
from groupwise.errors import UserError
from groupwise.training.plain import PLAIN

if TYPE_CHECKING:
    from groupwise.training.private_step import LossesOf, PrivateStep

WARM_UP = 2
"""Microbatches of a shape that run eagerly before capture, while libraries choose their kernels."""
MAX_GRAPHS = 64
"""Microbatches of further shapes run eagerly. All graphs share one pool of memory."""


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
        """Drop all graphs, and start a new memory pool: one whose graphs are gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class Recorded:
    """A captured microbatch: its static inputs, and the tensors that its losses and squared norms are written to."""

    inputs: list[Any]
    launch: Callable[[], None]
    losses: Tensor
    squared_norms: dict[int, Tensor]
    launches: int = 0


class Graphs:
    """Runs microbatches, from the third of a shape on by a CUDA graph.

    Args:
        recorder: of the device.
        model: whose losses are recorded.
    """

    def __init__(self, recorder: CudaRecorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def running(self) -> AbstractContextManager[None]:
        """Inside, `clip` may be called."""
        return self._recorder.running()

    def clip(
        self,
        private: "PrivateStep",
        rows: np.ndarray,
        present: Tensor,
        batch: Any,
        losses: Callable[[Any], Tensor],
        again: "LossesOf",
    ) -> Tensor:
        """Do the same as `PrivateStep.clip` for these rows.

        Args:
            batch: the rows as read: tensors on the device and plain values, in tuples, lists and dicts.
            losses: batch -> one loss a row, (b,).
            again: some of the rows -> their losses, for a trace.

        Raises:
            UserError: the work cannot be recorded; the batch holds something else.
        """
        leaves, spec = tree_flatten((present, batch))

        def add(leaves: list[Any]) -> Tensor:
            present, batch = tree_unflatten(leaves, spec)

            def losses_of(some: Any) -> Tensor:
                return losses(batch) if some is rows else again(some)

            return private.clip(losses_of, rows, present)  # type: ignore[arg-type]  # an array is a sequence of numbers

        engine = private.engine
        key = self._key(leaves, spec, engine)
        if key is None:
            return add(leaves)
        if (known := self._recorded.get(key)) is not None:
            self._launch(known, leaves, lambda: losses(batch) * present)
            if engine is not None:
                engine.squared_norms = known.squared_norms
                engine.repeated(len(rows))
        elif self._seen[key] < WARM_UP or len(self) >= MAX_GRAPHS:
            self._seen[key] += 1
            return add(leaves)
        else:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            made, launch = self._record(lambda: add(leaves))
            known = Recorded(leaves, launch, made, {} if engine is None else engine.squared_norms)
            self._recorded[key] = known
        return known.losses

    def forget(self) -> None:
        """Free the graphs and their memory; microbatches warm up again."""
        self._recorded.clear()
        self._seen.clear()
        self._recorder.forget()

    def _launch(self, known: Recorded, leaves: list[Any], losses: Callable[[], Tensor]) -> None:
        """Launch a graph on these inputs; after 1, 2, 4, 8, … launches compare its losses with an eager forward pass.

        Raises:
            UserError: they differ, on the same inputs and masks.
        """
        for held, leaf in zip(known.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                held.copy_(leaf)
        known.launches += 1
        power_of_two = known.launches & (known.launches - 1) == 0
        expected = self._eager(losses) if power_of_two else None
        known.launch()
        if expected is not None and not torch.allclose(known.losses, expected, rtol=0.05, atol=1e-3, equal_nan=True):
            raise UserError(
                f"cuda_graph: at launch {known.launches} of a graph the losses are not those that an eager pass "
                "computes now: something other than the batch changed. Put it into the batch, or keep it in a buffer "
                "that is changed in place, or leave cuda_graph out."
            )

    def _key(self, leaves: list[Any], spec: TreeSpec, engine: ClippingEngine | None) -> tuple[Any, ...] | None:
        """What a graph is valid for: shapes, plain values, masked rows, modes, and the addresses of the model's
        tensors and gradients; None while there are no gradients, or sparse ones.

        Raises:
            UserError: a part of the batch that is neither on the device nor plain.
        """
        parameters = list(self._model.parameters())
        device = parameters[0].device
        for leaf in leaves:
            if not (leaf.device == device if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN)):
                raise UserError(
                    f"cuda_graph: the batch holds a {type(leaf).__name__} that is not on {device}, which no graph "
                    "would update: give tensors, numbers and text in tuples, lists or dicts, or leave cuda_graph out."
                )
        gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
        if any(gradient is None or gradient.layout != torch.strided for gradient in gradients):
            return None
        shown = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in leaves)
        addresses = tuple(t.data_ptr() for t in (*gradients, *parameters, *self._model.buffers()) if t is not None)
        modes = tuple(module.training for module in self._model.modules())
        return engine is not None and engine.masks_rows, spec, shown, addresses, modes

    def _record(self, add: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The losses of a microbatch, and what launches its graph."""
        made = list[Tensor]()

        def work() -> None:
            made[:] = [add()]

        launch = self._recorder.record(work)  # torch raises RuntimeError where the model waits for the GPU
        return made[0], launch

    def _eager(self, losses: Callable[[], Tensor]) -> Tensor:
        """The losses (b,) by a forward pass past the engine that leaves generators and buffers as they were.

        It is one with gradients, as attention without may draw other masks.
        """
        device = next(self._model.parameters()).device
        drawn = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with kept_buffers(self._model), drawn, torch.enable_grad():
            return losses().detach()


def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder of a GPU; raises `UserError` on another device."""
    if device.type != "cuda":
        raise UserError(f"cuda_graph needs an NVIDIA GPU, and this run is on {device.type}: leave it out.")
    return CudaRecorder(device)
