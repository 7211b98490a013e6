"""Runs layers and products inside their groups: looks up where an input holds the batch, and the group's open pass.

Besides the model's own layers a group may have members that are none: a parameter that a module uses by itself, and
linear maps and embeddings inside a module. They are made when they are first used.
"""

import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from groupwise.clipping.autograd import CopiesFunction, DirectFunction, LayerFunction, probe_of
from groupwise.clipping.groups import ClippedLayer, ClippingGroup
from groupwise.clipping.layouts import FIRST, Layout
from groupwise.clipping.microbatches import GroupPass, OpenPasses
from groupwise.clipping.partition import COPIED
from groupwise.clipping.per_example import PerExample
from groupwise.clipping.precision import autocast
from groupwise.clipping.rules.base import LayerRule, RuleContext, find_rule
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.embedding_bag import BagRule
from groupwise.clipping.rules.linear import HFConv1DRule, LinearRule
from groupwise.clipping.rules.per_example import ParameterRule
from groupwise.errors import UserError

Values = list[Tensor | None]
"""The values of a layer's parameters, in the order of its rule's `parameter_names`."""


@dataclass(frozen=True)
class Use:
    """One parameter of a product: where it stands in its group (None: it does not train), and which rows are used."""

    place: int | None
    shape: torch.Size
    rows: slice | None = None
    padding_idx: int | None = None


class LayerCalls:
    """The calls of an engine's layers, while the model runs.

    Args:
        groups: the engine's.
        passes: where the passes of the groups are kept.
        context: what their rules share.
    """

    def __init__(self, groups: tuple[ClippingGroup, ...], passes: OpenPasses, context: RuleContext) -> None:
        self.passes, self._context = passes, context
        self._places = {id(p): (group, place) for group in groups for place, p in enumerate(group.parameters)}
        self._members: dict[tuple[object, ...], ClippedLayer] = {}
        self.compared: set[tuple[object, ...]] = set()
        """Operations whose results for examples one by one were seen to be those for the batch."""

    def find(self, label: str, x: Tensor, meets: bool = False) -> Layout:
        """Where the input of a call holds the batch, as the plan has it.

        Args:
            label: of the layer or parameter.
            x: its input.
            meets: x meets a parameter, or what was made of one, outside of a layer.

        Raises:
            UntracedCall: the plan does not know it.
            UserError: it is inside of `torch.func`, or x is nested or sparse.
        """
        if _hides_batch():
            _refuse_transforms(label)
        if x.is_nested or x.layout is not torch.strided:
            _refuse_layout(label, x)
        return self.passes.forward_pass.find(label, x, meets)

    @property
    def batch(self) -> int:
        """B of the forward pass."""
        return self.passes.forward_pass.examples

    @property
    def traces(self) -> bool:
        """Whether the forward pass is one of the trace."""
        return self.passes.forward_pass.traces

    # -- members that are no layers of the model ------------------------------------------------------------------

    def place_of(self, parameter: nn.Parameter) -> tuple[ClippingGroup, int] | None:
        """The group of a parameter that trains, and its place there."""
        return self._places.get(id(parameter))

    def product(self, kind: str, group: ClippingGroup, uses: tuple[Use | None, ...]) -> ClippedLayer:
        """A layer of a group's parameters: its weight and its bias, if that trains.

        Args:
            kind: what it does with them: "linear", "transposed" (linear, with a weight (d, p)), "embedding" or "bags".
            group: whose parameters they are.
            uses: one for each parameter; None where there is none, or it does not train.
        """
        key = (
            kind,
            group.index,
            *((u.place, u.rows and (u.rows.start, u.rows.stop), u.shape, u.padding_idx) for u in uses if u),
        )
        if key not in self._members:
            weight = uses[0]
            assert weight is not None
            rule: LayerRule
            with torch.device("meta"):
                if kind in ("embedding", "bags"):
                    table = nn.Embedding(weight.shape[0], weight.shape[1], weight.padding_idx)
                    rule = EmbeddingRule(table) if kind == "embedding" else BagRule(table)
                else:
                    kinds = {"linear": LinearRule, "transposed": HFConv1DRule}
                    rule = kinds[kind](nn.Linear(weight.shape[1], weight.shape[0], any(uses[1:])))
            places = tuple(None if u is None else u.place for u in uses)
            name = next(group.names[place] for place in places if place is not None)
            rows = tuple(None if u is None else u.rows for u in uses)
            wanted = tuple(place is not None for place in places)
            context = self._context.for_layer()
            self._members[key] = ClippedLayer(name, rule, wanted, places, context, rows if any(rows) else ())
        return self._members[key]

    def copies(self, group: ClippingGroup, place: int) -> Tensor:
        """A parameter's copies (B, *shape), made once a forward pass."""
        batch = self.batch
        key = ("parameter", group.index, place)
        if key not in self._members:
            home, local = group.homes[place]
            if find_rule(home) is not None and home.get_parameter(local).numel() > COPIED and batch > 1:
                warnings.warn(
                    f"groupwise has no rule for what is done with {group.names[place]} beside its layer: it is clipped "
                    "exactly, with a gradient for each example in memory. Linear maps (F.linear, @) need none.",
                    stacklevel=2,
                )
            rule = ParameterRule(home, local)
            self._members[key] = ClippedLayer(group.names[place], rule, (True,), (place,), self._context.for_layer())
        member, parameter = self._members[key], group.parameters[place]
        group_pass = self.passes.open.get(group.index)
        if group_pass is not None and place in group_pass.copies:
            return group_pass.copies[place]
        group_pass, probe = self.enter(group, member, parameter.device)
        copies: Tensor = CopiesFunction.apply(group_pass, member, probe, parameter.detach())
        group_pass.copies[place] = copies
        return copies

    # -- calls of layers ------------------------------------------------------------------------------------------

    def enter(
        self, group: ClippingGroup, member: ClippedLayer, device: torch.device
    ) -> tuple[GroupPass, Tensor | None]:
        """The group's pass for a call, and its probe."""
        group_pass = self.passes.pass_of(group, member)
        return group_pass, group_pass.probe if group_pass.probe is not None else probe_of(group_pass, device)

    def layer(self, module: nn.Module, group: ClippingGroup, member: ClippedLayer, *args: Any, **kwargs: Any) -> Any:
        """What stands in place of a layer's forward."""
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        if len(args) != 1 or kwargs:
            args = (only_argument(module, member.name, args, kwargs),)
        x, values = member.rule.prepare(args[0]), member.rule.values()
        for place, value in zip(member.parameter_indices, values, strict=True):
            if place is not None and value is not None and not isinstance(value, nn.Parameter):
                raise UserError(
                    f"Layer {member.name!r} of the attached model got a tensor in the place of its parameter "
                    f"{group.names[place]!r} (by functional_call, say), which cannot be clipped: compute it inside a "
                    "module (torch.nn.utils.parametrize)."
                )
        return self.run(group, member, x, values)

    def run(
        self, group: ClippingGroup, member: ClippedLayer, x: Tensor, values: Values, layout: Layout | None = None
    ) -> Tensor:
        """A layer's output for an input x, with its parameters' values; `layout` where it is known already."""
        if isinstance(x, PerExample):
            return PerExample.of_rows(self._run_rows(group, member, x.rows, values), _output_of(self, group, member))
        if (
            self.passes.forward_pass.examples == 1 and _lacks_batch(member.rule, x) and not _hides_batch()
        ):  # squeezed away
            return self.run(group, member, x.unsqueeze(0), values, Layout()).squeeze(0)
        layout = layout or self.find(member.label, x)
        if layout.shared:
            return self._without_batch(group, member, x, values)
        if layout.axis and (layout.each > 1 or not member.rule.features_last):
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} with the batch on axis {layout.axis}: this "
                "type of layer is clipped with the batch on its first axis."
            )
        return self._apply(group, member, layout, x, values)

    def _apply(self, group: ClippingGroup, member: ClippedLayer, layout: Layout, x: Tensor, values: Values) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x, values = autocast(member.rule.autocast, x, values)
        group_pass, probe = self.enter(group, member, x.device)
        y: Tensor = LayerFunction.apply(group_pass, member, layout, values, probe, x)
        return y

    def run_direct(self, group: ClippingGroup, member: ClippedLayer, x: Tensor, parameters: Values) -> Tensor:
        """A layer's output where it returns its parameters' gradients itself; x has the batch as its first axis."""
        if self.find(member.label, x) != FIRST:
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} without one row for each example on the first "
                "axis, and in shards (direct=True) no other layout is possible: do without fully_shard."
            )
        x, _ = autocast(member.rule.autocast, x, [])
        group_pass, probe = self.enter(group, member, x.device)
        y: Tensor = DirectFunction.apply(group_pass, member, probe, x, *parameters)
        return y

    def _run_rows(self, group: ClippingGroup, member: ClippedLayer, rows: Tensor, values: Values) -> Tensor:
        """The output for each example's own input, rows (B, ...)."""
        batch, each = len(rows), rows.shape[1] if member.rule.has_batch(rows.dim() - 1) else 0
        alike = each > 1 and rows.stride(1) == 0  # a parameter that was expanded: one stands for all
        if each:
            rows = (rows[:, :1] if alike else rows).flatten(0, 1)
        layout = FIRST if each < 2 or alike else Layout(0, each)
        y = self._apply(group, member, layout, rows, values)
        y = y.unflatten(0, (batch, -1)) if each else y
        return y.expand(-1, each, *y.shape[2:]) if alike else y

    def _without_batch(self, group: ClippingGroup, member: ClippedLayer, x: Tensor, values: Values) -> PerExample:
        """The output for an input that all examples share; it has a copy for each of them once it is used."""
        with torch.no_grad():
            inputs, lowered = autocast(member.rule.autocast, x, values)
            like, _ = member.rule.forward(inputs, *lowered)
        made: list[Tensor] = []
        rows = x.unsqueeze(0).expand(self.batch, *x.shape)

        def make() -> Tensor:
            if not made:
                made.append(self._run_rows(group, member, rows, values))
            return made[0]

        return PerExample(make, like, _output_of(self, group, member))


class GroupOrigin:
    """The origin of a `PerExample`: what a layer made of an input without a batch axis, or a parameter.

    Args:
        calls: of the engine's layers.
        group: of the layer or parameter.
        label: its name, for messages.
    """

    def __init__(self, calls: LayerCalls, group: ClippingGroup, label: str) -> None:
        self.calls, self.group, self.label, self.compared = calls, group, label, calls.compared

    @property
    def traces(self) -> bool:
        """Whether the forward pass is one of the trace, in which nothing is clipped."""
        return self.calls.traces

    def find(self, x: Tensor, meets: bool = True) -> Layout:
        """Where a plain tensor that meets the `PerExample` holds the batch; `meets`: in an operation without a rule."""
        return self.calls.find(self.label, x, meets)


def only_argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer is called with; more than one argument is refused."""
    if len(args) + len(kwargs) != 1:
        raise UserError(
            f"Layer {name!r} ({type(module).__name__}) was called with {len(args) + len(kwargs)} arguments, "
            "and it is clipped for calls with its input alone: leave the others out, or freeze it."
        )
    return args[0] if args else next(iter(kwargs.values()))


def _output_of(calls: LayerCalls, group: ClippingGroup, member: ClippedLayer) -> GroupOrigin:
    return GroupOrigin(calls, group, f"The output of layer {member.name!r}")


def _lacks_batch(rule: LayerRule, x: Tensor) -> bool:
    if rule.features_last:
        return x.dim() == 1 and x.is_floating_point()
    return rule.has_batch(x.dim() + 1) and not rule.has_batch(x.dim())


def _hides_batch() -> bool:
    """Whether tensors are those of `torch.func` or of `torch.autograd.forward_ad`, which show fewer axes."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _refuse_transforms(label: str) -> NoReturn:
    raise UserError(
        f"{label} is used inside of torch.func (vmap, grad, jvp, jacrev) or forward-mode derivatives, which hide the "
        "batch axis: use it on the whole batch (derivatives by finite differences), or freeze it."
    )


def _refuse_layout(label: str, x: Tensor) -> NoReturn:
    nested = "pad them to the longest (torch.nested.to_padded_tensor), and give the model a mask"
    raise UserError(
        f"{label} got a {'nested' if x.is_nested else 'sparse'} tensor, whose examples are not told apart: "
        f"{nested if x.is_nested else 'make it dense (to_dense)'}."
    )
