"""Captures the work of a microbatch as a CUDA graph, one for each shape, and launches the graph instead of its kernels.

In a small step on a GPU the host is the bottleneck, as it launches about a thousand kernels one by one. A graph has the
forward and the clipped backward pass of a microbatch, and takes one launch. Python code runs only when a graph is
captured. Its decisions depend on shapes and on the model, but not on values on the GPU, which a step reads only after
its last microbatch. Each launch reads thresholds, weights, counts, gradients and the dropout seed from memory, so one
graph serves all steps. As Poisson batches have many sizes, microbatches are padded to a few sizes with filler rows,
whose losses are multiplied by 0 (`Microbatches.split`).

A value that the model computes in Python would stay as it was when the graph was captured, and so would a tensor that
is not an input, parameter or buffer. So the losses of the 1st, 2nd, 4th, 8th, … launch are compared with those of an
eager forward pass on the same inputs and dropout masks, and a difference raises an error.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from groupwise.clipping import ClippingEngine
from groupwise.clipping.unchanged import unchanged
from groupwise.errors import UserError
from groupwise.training.plain import PLAIN

if TYPE_CHECKING:
    from groupwise.training.private_step import PrivateStep

WARM_UP = 2
"""The number of microbatches of a shape that run eagerly before capture, while libraries choose their kernels."""
MAX_GRAPHS = 64
"""The largest number of graphs; microbatches of further shapes run eagerly. All graphs share one pool of memory."""


class CudaRecorder:
    """Captures CUDA graphs on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the work inside on the recorder's stream, after all earlier and before all later work of the caller."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once, as a graph; returns a function that launches the graph again, on the same memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        graph.replay()  # as capturing runs nothing
        return graph.replay

    def forget(self) -> None:
        """Start a new memory pool. Call it after all graphs were deleted, as their pool cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class Recorded:
    """A captured microbatch: its static inputs, and the tensors to which its losses and squared norms are written."""

    inputs: list[Any]
    launch: Callable[[], None]
    losses: Tensor
    squared_norms: dict[int, Tensor]
    launches: int = 0


class Graphs:
    """Runs microbatches of a model, as CUDA graphs from the third microbatch of a shape on."""

    def __init__(self, recorder: CudaRecorder, model: nn.Module) -> None:
        self.recorder, self._model = recorder, model
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def clip(
        self,
        private: "PrivateStep",
        rows: np.ndarray,
        present: Tensor,
        batch: Any,
        losses_of: Callable[[Any, Any], Tensor],
    ) -> Tensor:
        """Do the same as `PrivateStep.clip`, as a CUDA graph where that is possible. Call it in `recorder.running()`.

        Args:
            rows, present: see `PrivateStep.clip`.
            batch: the examples: only tensors on the device, numbers and text, in tuples, lists and dicts.
            losses_of: a function of the batch and `rows` that returns their losses, (b,), or of other rows, which are
                not in the batch, for the trace.
        """
        leaves, spec = tree_flatten((present, batch))

        def add(leaves: list[Any]) -> Tensor:
            present, batch = tree_unflatten(leaves, spec)
            return private.clip(partial(losses_of, batch), rows, present)  # type: ignore[arg-type]  # as a sequence

        engine = private.engine
        key = self._key(leaves, spec, engine)
        if key is None:
            return add(leaves)
        if (known := self._recorded.get(key)) is not None:
            self._launch(known, leaves, lambda: losses_of(batch, rows) * present)
            if engine is not None:
                engine.squared_norms = known.squared_norms
                engine.repeated(len(rows))
        elif self._seen[key] < WARM_UP or len(self) >= MAX_GRAPHS:
            self._seen[key] += 1
            return add(leaves)
        else:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            made: list[Tensor] = []
            launch = self.recorder.record(lambda: made.append(add(leaves)))  # RuntimeError if it reads from the GPU
            known = Recorded(leaves, launch, made[0], {} if engine is None else engine.squared_norms)
            self._recorded[key] = known
        return known.losses

    def forget(self) -> None:
        """Free the graphs and their memory. Each shape warms up again."""
        self._recorded.clear()
        self._seen.clear()
        self.recorder.forget()

    def _launch(self, known: Recorded, leaves: list[Any], losses: Callable[[], Tensor]) -> None:
        """Launch a graph on these inputs. At launches 1, 2, 4, 8, … compare its losses with an eager forward pass."""
        for held, leaf in zip(known.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                held.copy_(leaf)
        known.launches += 1
        power_of_two = known.launches & (known.launches - 1) == 0
        expected = self._eager(losses) if power_of_two else None
        known.launch()
        if expected is not None and not torch.allclose(known.losses, expected, rtol=0.05, atol=1e-3, equal_nan=True):
            raise UserError(
                f"cuda_graph: at launch {known.launches} of a graph its losses differ from those of an eager pass, as "
                "something other than the batch has changed. Put it into the batch, or keep it in a buffer that is "
                "changed in place, or leave cuda_graph out."
            )

    def _key(self, leaves: list[Any], spec: TreeSpec, engine: ClippingEngine | None) -> tuple[Any, ...] | None:
        """The key of a microbatch's graph: all that a graph keeps, and that may differ between microbatches.

        These are shapes and dtypes, plain values of the batch, whether rows are masked, the modes of modules, and the
        addresses of parameters, buffers and gradients. Returns None if a gradient is None or sparse.
        """
        parameters = list(self._model.parameters())
        device = parameters[0].device
        for leaf in leaves:
            if not (leaf.device == device if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN)):
                raise UserError(
                    f"cuda_graph: the batch contains a {type(leaf).__name__} that is not on {device}, so a graph "
                    "cannot update it: use tensors, numbers and text, in tuples, lists or dicts, or leave cuda_graph "
                    "out."
                )
        gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
        if any(gradient is None or gradient.layout != torch.strided for gradient in gradients):
            return None
        shown = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in leaves)
        addresses = tuple(t.data_ptr() for t in (*gradients, *parameters, *self._model.buffers()) if t is not None)
        modes = tuple(module.training for module in self._model.modules())
        return engine is not None and engine.masks_rows, spec, shown, addresses, modes

    def _eager(self, losses: Callable[[], Tensor]) -> Tensor:
        """The losses, (b,), of a forward pass without clipping, which leaves generators and buffers unchanged.

        Gradients are enabled, as attention may draw other dropout masks without them.
        """
        with unchanged(self._model):
            return losses().detach()


def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder for a GPU; raises `UserError` for any other device."""
    if device.type != "cuda":
        raise UserError(f"cuda_graph needs an NVIDIA GPU, but this run is on {device.type}: leave it out.")
    return CudaRecorder(device)
