"""Cuts a model's tensors over the processes of a tensor group, and puts whole tensors together again.

torch's DTensor says which rows are whose, and sends them. Inside, a process has its part as a plain parameter of a
plain layer: clipping rules read activations and gradients of single examples, on which DTensor has no operations.

Identity forth and a sum back, and the reverse, join the parts of cut layers (Shoeybi et al., 2019, section 3). A layer
that is cut by its outputs reads what all processes have, and each knows a part of the input's gradient: that is summed
on the way back. The next one is cut by its inputs, and its outputs are summed on the way forth. Between the two nothing
is sent. A sum is over processes, of the same example's numbers, so no example meets another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from groupwise.clipping.partition import find_layers
from groupwise.clipping.parts import Parts
from groupwise.privacy.randomness import randomness_of_part
from groupwise.tensor.plan import Cut, cuts_of, set_widths
from groupwise.training.ranks import Alone, Ranks


class _Copied(torch.autograd.Function):
    """x, of which every process has a copy; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return _summed(g, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over processes of what each has; they all have its gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Conjugates:
    """Hooks around the layers of one model that join its parts.

    Args:
        mesh: of the processes that have the parts, in one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self._known: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def before_columns(self, module: nn.Module) -> None:
        """Around a layer that is cut by its outputs: the gradient of its input is summed."""
        module.register_forward_pre_hook(lambda _, args: (self._copied(args[0]), *args[1:]))

    def after_rows(self, module: nn.Module) -> None:
        """Around a layer that is cut by its inputs: its output is summed."""
        module.register_forward_hook(lambda _, __, y: _Summed.apply(y, self.group))

    def around_rows_of_a_table(self, module: nn.Embedding, first: int) -> None:
        """Around an embedding of the rows from `first` on: other indices give zeros, and the outputs are summed."""
        elsewhere: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            own = args[0] - first
            elsewhere[:] = [(own < 0) | (own >= module.num_embeddings)]
            return own.masked_fill(elsewhere[0], 0), *args[1:]

        def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            return _Summed.apply(y.masked_fill(elsewhere.pop().unsqueeze(-1), 0), self.group)  # type: ignore[no-any-return]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def after_head(self, module: nn.Module, columns: int) -> None:
        """Around a head that is cut by its outputs, of which there are so many.

        They stay cut, as a DTensor, where gradients are on, for a loss that takes that (`tasks.text_task.cut_losses`);
        any other operation on them knows how to work on parts, or fails. Elsewhere every process gets all of them.
        """

        def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            whole = torch.empty(*y.shape[:-1], columns, device="meta")
            last = [Shard(y.dim() - 1)]
            parts = DTensor.from_local(y, self.mesh, last, run_check=False, shape=whole.shape, stride=whole.stride())
            return parts if y.requires_grad else parts.full_tensor()

        module.register_forward_hook(after)

    def _copied(self, x: Tensor) -> Tensor:
        """The same copy for all layers that read one tensor, so that one sum serves them all."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._known is not None and self._known[0]() is x and (copy := self._known[1]()) is not None:
            return copy
        copy = _Copied.apply(x, self.group)
        assert copy is not None
        self._known = weakref.ref(x), weakref.ref(copy)
        return copy


@dataclass(frozen=True)
class Split:
    """How one tensor is cut: along an axis of a view that has side by side matrices apart."""

    axis: int
    pieces: int
    shape: torch.Size
    """Of the whole tensor."""

    def apart(self, tensor: Tensor) -> Tensor:
        """A whole or local tensor -> with its pieces on an axis of their own, before that which is cut."""
        return tensor.unflatten(self.axis, (self.pieces, -1))

    def local(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """This process's part of a tensor that every process has whole; nothing is sent."""
        parts = distribute_tensor(self.apart(whole), mesh, [Shard(self.axis + 1)], src_data_rank=None)
        return parts.to_local().flatten(self.axis, self.axis + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """The whole tensor, on every process; all call it at once."""
        like = self.apart(torch.empty(self.shape, device="meta"))
        parts = DTensor.from_local(
            self.apart(local.contiguous()),
            mesh,
            [Shard(self.axis + 1)],
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return parts.full_tensor().flatten(self.axis, self.axis + 1)


@dataclass
class CutModel:
    """A model of which this process has a part; state dicts go in and come out whole."""

    model: nn.Module
    mesh: DeviceMesh
    first: bool
    """Whether this process owns what is whole."""
    splits: dict[str, Split] = field(default_factory=dict)
    """By the names of parameters, each under its first."""
    elsewhere: frozenset[str] = frozenset()
    """Parameters of which this process has a zero in the place of what the first one adds."""
    layers: frozenset[str] = frozenset()
    """Those that are cut."""
    sizes: dict[str, int] = field(default_factory=dict)
    """As `Parts.sizes`."""

    @property
    def trainable(self) -> list[str]:
        """Names of what trains here, in the order of the optimiser."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @property
    def copied(self) -> list[str]:
        """Names of what trains, and is whole in every process."""
        return [name for name in self.trainable if name.rpartition(".")[0] not in self.layers]

    def parts(self, add_up: Callable[[Tensor], None] | None) -> Parts:
        """What the engine must know; `add_up` is None where each process's share is a group of its own."""
        copies = frozenset() if self.first else frozenset(self.copied)
        return Parts(self.layers, copies, self.sizes, add_up)

    def whole_model(self) -> dict[str, Tensor]:
        """The state dict of the whole model, on the CPU; {} on all but the first process. All call it at once."""
        made: dict[int, Tensor] = {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in made:
                made[id(value)] = self._whole(names.get(id(value), name), value.detach())
            found[name] = made[id(value)]
        return found if self.first else {}

    def local_model(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model's `load_state_dict` takes, from the whole model's state dict."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = self.model.state_dict(keep_vars=True)
        return {name: self._local(names.get(id(value), name), whole[name], value) for name, value in own.items()}

    def whole_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimiser's state dict with whole tensors by the names of parameters; {} on all but the first process."""
        found = {
            name: {key: self._moment(name, value, self._whole) for key, value in state["state"][i].items()}
            for i, name in enumerate(self.trainable)
            if i in state["state"]
        }
        groups = [{**group, "params": []} for group in state["param_groups"]]
        return {"state": found, "param_groups": groups} if self.first else {}

    def local_optimizer(self, whole: dict[str, Any]) -> dict[str, Any]:
        """What `load_state_dict` of this process's optimiser takes, from `whole_optimizer`."""

        def cut(name: str, value: Tensor) -> Tensor:
            return self._local(name, value, value)

        own = {
            i: {key: self._moment(name, value, cut) for key, value in whole["state"][name].items()}
            for i, name in enumerate(self.trainable)
            if name in whole["state"]
        }
        numbers = list(range(len(self.trainable)))
        return {"state": own, "param_groups": [{**group, "params": numbers} for group in whole["param_groups"]]}

    def whole_state(self, state: dict[str, Any], ranks: Alone | Ranks, one_group: bool) -> dict[str, Any]:
        """A trainer's state, whose model is whole already, with whole tensors; thresholds by part, unless all parts are
        one group."""
        found = {**state, "optimizer": self.whole_optimizer(state["optimizer"])}
        if not one_group:
            found["thresholds"] = {str(part): own for part, own in enumerate(ranks.gather_parts(state["thresholds"]))}
        return found

    def local_state(self, state: dict[str, Any], ranks: Alone | Ranks, one_group: bool) -> dict[str, Any]:
        """What the trainer's `load_state_dict` takes, from `whole_state`."""
        model, optimizer = self.local_model(state["model"]), self.local_optimizer(state["optimizer"])
        thresholds = state["thresholds"] if one_group else state["thresholds"][str(ranks.part)]
        return {**state, "model": model, "optimizer": optimizer, "thresholds": thresholds}

    def _whole(self, name: str, local: Tensor) -> Tensor:
        split = self.splits.get(name)
        return (local if split is None else split.whole(local, self.mesh)).detach().cpu()

    def _local(self, name: str, whole: Tensor, own: Tensor) -> Tensor:
        if name in self.elsewhere:
            return own.detach()
        split = self.splits.get(name)
        return whole if split is None else split.local(whole.to(self.mesh.device_type), self.mesh)

    def _moment(self, name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
        """Tensors of an optimiser are like their parameter, or a count of steps."""
        return change(name, value) if isinstance(value, Tensor) and value.dim() > 0 else value


def cut(model: nn.Module, ranks: Alone | Ranks, device: torch.device, cuts: list[Cut] | None = None) -> CutModel:
    """Leave this process its part of a transformers model that is whole, and the same, in every process.

    `cuts` says how, of a model that is a part of one; None asks `cuts_of`.

    Afterwards the model has the same layers under the same names, and its forward and backward passes send messages:
    all processes run them at once.

    Raises:
        UserError: as `cuts_of`.
    """
    cuts = cuts_of(model, ranks.parts) if cuts is None else cuts
    ranks.copy_parts_([*model.parameters(), *model.buffers()])
    made = CutModel(model, _mesh(ranks, device), ranks.part == 0, sizes=_sizes(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known: dict[int, nn.Parameter] = {}
    joints, elsewhere = Conjugates(made.mesh), set()
    for each in cuts:
        for local, parameter in list(each.module.named_parameters(recurse=False)):
            axis = each.axis(local)
            if axis is not None:
                split = Split(axis, each.pieces, parameter.shape)
                if id(parameter) not in known:
                    part = split.local(parameter.detach(), made.mesh)
                    known[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
                    made.splits[names[id(parameter)]] = split
                each.module.register_parameter(local, known[id(parameter)])
            elif not made.first:
                zero = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
                each.module.register_parameter(local, zero)
                elsewhere.add(f"{each.name}.{local}")
        _join(each, model, joints, made, ranks)
    made.elsewhere, made.layers = frozenset(elsewhere), frozenset(each.name for each in cuts)
    if _drops_out(model):
        _give_own_masks(model, cuts, ranks.part, device)
    return made


def _join(each: Cut, model: nn.Module, joints: Conjugates, made: CutModel, ranks: Alone | Ranks) -> None:
    module: Any = each.module
    whole = getattr(module, "out_features", 0)
    set_widths(each, model, ranks.parts)
    if each.way == "columns":
        joints.before_columns(module)
    elif each.way == "rows":
        joints.after_rows(module)
    elif each.way == "head":
        joints.before_columns(module)
        joints.after_head(module, whole)
    else:
        first = -(-module.num_embeddings // ranks.parts) * ranks.part  # as DTensor cuts
        module.num_embeddings = module.weight.shape[0]
        padding = None if module.padding_idx is None else module.padding_idx - first
        module.padding_idx = padding if padding is not None and 0 <= padding < module.num_embeddings else None
        joints.around_rows_of_a_table(module, first)


def _mesh(ranks: Alone | Ranks, device: torch.device) -> DeviceMesh:
    assert isinstance(ranks, Ranks) and ranks.tensor is not None
    return DeviceMesh.from_group(ranks.tensor, device.type)


def _sizes(model: nn.Module) -> dict[str, int]:
    seen: set[int] = set()
    sizes = {}
    for layer in find_layers(model):
        new = {id(p): p.numel() for p in layer.trainable.values() if id(p) not in seen}
        seen |= new.keys()
        sizes[layer.name] = sum(new.values())
    return sizes


def _drops_out(model: nn.Module) -> bool:
    """Whether anything in the model may drop what it computes."""
    config: Any = model.config
    rates = (value for key, value in vars(config).items() if "drop" in key and isinstance(value, float))
    return any(rates) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _give_own_masks(model: nn.Module, cuts: list[Cut], part: int, device: torch.device) -> None:
    """From the beginning of a module with columns to the rows that follow, or its end, masks are of this part alone."""
    inside = ExitStack()

    def enter(module: nn.Module, *_: Any) -> None:
        inside.close()
        if module.training:
            inside.enter_context(randomness_of_part(part, device))

    def leave(*_: Any) -> None:
        inside.close()

    around = {each.name.rpartition(".")[0] for each in cuts if each.way == "columns"}
    for name in sorted(around):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
    for each in cuts:
        if each.way == "rows":
            each.module.register_forward_pre_hook(leave)
