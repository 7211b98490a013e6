"""Measures the memory and operations of a stage by running its code on fake tensors."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from groupwise.clipping import ClipPlan, attach, flat, matmul
from groupwise.clipping.clip_plan import FIRST, Layout
from groupwise.clipping.norm_methods import RATES
from groupwise.pipeline.split import cut
from groupwise.pipeline.stage import Stage, with_blocks
from groupwise.planner.shapes import build

_aten = torch.ops.aten
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v: sdpa_flop_count(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v: sdpa_backward_flop_count(g, q, k, v),
}
"""Operations that torch's own counter does not count."""


class Meter(TorchDispatchMode):
    """While active, counts the bytes of new tensors, their peak since `restart`, and the operations since `restart`.

    Operations are those of matrix products, convolutions and attention; a multiply-add counts as two. Temporary memory
    inside a kernel is not counted. (torch's FlopCounterMode would keep tensors alive.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self.operations = 0
        self._known: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count these tensors and their views."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def restart(self) -> int:
        """Reset peak and operations, and return the bytes that are held."""
        self.peak, self.operations = self.held, 0
        return self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:  # code that branches on a value: answer as for a usual batch
            return {torch.bool: True}.get(args[0].dtype, 1)
        out = func(*args, **(kwargs or {}))
        self.operations += _operations(func, args, kwargs or {}, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def _imagine(module: nn.Module, fake: FakeTensorMode) -> None:
    """Put fake tensors in the place of a module's parameters and buffers; parameters that are one stay one."""
    seen: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        with fake:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    for part in module.modules():
        for places in (part._parameters, part._buffers):
            for name, tensor in places.items():
                if tensor is not None:
                    places[name] = seen.setdefault(id(tensor), copy(tensor))  # type: ignore[assignment]


def _operations(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    kind = func._overloadpacket
    if kind in _ATTENTION:
        return _ATTENTION[kind](*(t.shape for t in args[: 3 + kind.__name__.endswith("backward")]))
    return flop_registry[kind](*args, **kwargs, out_val=out) if kind in flop_registry else 0


@dataclass(frozen=True)
class Work:
    """The settings that determine bytes and operations of all stages.

    Args:
        config: transformers' configuration of the whole model.
        microbatch: b.
        length: T.
        rank, dtype: see `shapes.build`.
        rematerialize: see `split.cut`.
    """

    config: Any = field(compare=False)
    microbatch: int
    length: int
    rank: int = 32
    dtype: str = "float32"
    rematerialize: bool = True


@dataclass(frozen=True)
class Kind:
    """A kind of stage: its number of blocks, and whether it has the embedding or the head."""

    blocks: int
    first: bool
    last: bool


def cut_out(work: Work, kind: Kind, device: str = "meta") -> Stage:
    """Return a stage of this kind, from the smallest model that has one, with random weights."""
    before, after = int(not kind.first), int(not kind.last)
    stops = [*[1] * before, before + kind.blocks, *[before + kind.blocks + 1] * after]
    model = build(with_blocks(work.config, 0, stops[-1]), work.rank, work.dtype, device)
    ranges = tuple(zip([0, *stops[:-1]], stops, strict=True))
    precision = partial(torch.autocast, "cpu", torch.bfloat16) if work.dtype == "bfloat16" else nullcontext
    return cut(model, ranges, before, rematerialize=work.rematerialize, precision=precision)


def inputs(stage: Stage, work: Work) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a stage's input and its other arguments. One token of each row is padding."""
    b, length = work.microbatch, work.length
    mask = torch.ones(b, length, dtype=torch.long)
    mask[:, -1:] = 0
    kwargs = {
        "attention_mask": mask,
        "position_ids": torch.arange(length).repeat(b, 1),
        "places": torch.arange(length).repeat(b, 1),
        "labels": torch.randint(0, work.config.vocab_size, (b, length)),
        "weights": torch.ones(b),
    }
    if stage.first:
        return torch.randint(0, work.config.vocab_size, (b, length)), kwargs
    return torch.randn(stage.activation(b, length)).to(stage.dtype).requires_grad_(), kwargs


class BatchFirst(ClipPlan):
    """A plan in which every layer's first axis is the batch, since fake tensors cannot be traced."""

    def find(self, label: str, nth: int, x: Tensor, examples: int) -> Layout:
        """See `ClipPlan`."""
        return replace(FIRST, rows_per_example=len(x) // examples)


PASSES = {"device": "backward_of", "norms": "norms_of", "sums": "sums_of"}
"""Per-device clipping (one group per stage), and the two passes of flat clipping -> the engine's backward pass."""


class Passes:
    """Runs one microbatch at a time through a stage that `cut_out` made for `work`.

    Args:
        name: one of `PASSES`, or none (without clipping).
    """

    def __init__(self, stage: Stage, work: Work, name: str) -> None:
        self.stage, self._work, self._name = stage, work, name
        self._engine = None if name == "none" else attach(stage, flat(stage), 1.0, rates=RATES["cuda"])
        if self._engine is not None:
            self._engine.plan = BatchFirst()

    def forward(self, x: Tensor, kwargs: dict[str, Tensor]) -> Tensor:
        """Return the stage's output, or its losses."""
        with nullcontext() if self._engine is None else self._engine.forward(self._work.microbatch, 0):
            return self.stage(x, **kwargs)

    def backward(self, out: Tensor, gradient: Tensor | None) -> None:
        """Run the backward pass from the output of `forward`; `gradient` is None on the last stage."""
        with nullcontext() if self._engine is None else getattr(self._engine, PASSES[self._name])(0):
            torch.autograd.backward(out.sum() if gradient is None else out, gradient)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a stage and of one microbatch in it, and operations.

    Args:
        frozen: weights that are not trained.
        trained: weights that are trained.
        received: the message from the previous stage, 0 for the first stage.
        sent: the message to the next stage, 0 for the last stage.
        stored: memory kept from the forward to the backward pass, with `sent` and without `received`.
        forward: peak of a forward pass, with what it stores.
        backward: peak of a backward pass, above the memory that is held when it starts.
        forward_operations: operations of a microbatch's forward pass.
        backward_operations: operations of its backward pass, recomputation and clipping included.
    """

    frozen: int
    trained: int
    received: int
    sent: int
    stored: int
    forward: int
    backward: int
    forward_operations: int
    backward_operations: int


def footprint(work: Work, kind: Kind, name: str) -> Footprint:
    """Return the footprint of a stage of this kind, from a forward and a backward pass `name` on fake tensors."""
    matmul.used()  # times two libraries' matrix products, which fake tensors cannot
    meter, fake, stage = Meter(), FakeTensorMode(allow_non_fake_inputs=True), cut_out(work, kind)
    _imagine(stage, fake)
    parameters = list(stage.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    meter.ignore(*parameters, *stage.buffers())
    with fake, meter:
        passes = Passes(stage, work, name)
        x, kwargs = inputs(stage, work)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)  # as for every microbatch but the first
        meter.ignore(x, *kwargs.values(), *(p.grad for p in trained if p.grad is not None))
        begin = meter.restart()
        out = passes.forward(x, kwargs)
        forward, forward_operations, stored = meter.peak - begin, meter.operations, meter.held - begin
        gradient = None if kind.last else torch.empty_like(out)
        if gradient is not None:
            meter.ignore(gradient)
        middle = meter.restart()
        passes.backward(out, gradient)
    return Footprint(
        frozen=sum(p.nbytes for p in parameters if not p.requires_grad),
        trained=sum(p.nbytes for p in trained),
        received=0 if kind.first else x.nbytes,
        sent=0 if kind.last else out.nbytes,
        stored=stored,
        forward=forward,
        backward=meter.peak - middle,
        forward_operations=forward_operations,
        backward_operations=meter.operations,
    )
