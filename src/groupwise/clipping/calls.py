"""Runs layers, and products with single parameters, inside their groups: as calls of the pass that runs.

Besides the model's own layers a group may have members that are none: a parameter that a module uses by itself, and
linear maps and embeddings inside a module. They are made when they are first used.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.autograd import LayerFunction, ReportFunction, enter
from groupwise.clipping.clip_plan import FIRST, Layout
from groupwise.clipping.groups import ClippedLayer, ClippingGroup
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.passes import Passes
from groupwise.clipping.per_example import PerExample
from groupwise.clipping.precision import autocast
from groupwise.clipping.rules.base import LayerRule, ParameterRule
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.linear import HFConv1DRule, LinearRule
from groupwise.errors import UserError

Values = list[Tensor | None]
"""The values of a layer's parameters, in the order of its rule's `parameter_names`."""


COPIED = 4096
"""Parameters of fewer numbers cost little where every example has a copy."""


class LayerCalls:
    """The calls of an engine's layers, while the model runs.

    Args:
        passes: where the passes of the groups are kept.
        methods: how the layers' norms are computed.
    """

    def __init__(self, passes: Passes, methods: NormMethods) -> None:
        self.passes, self.methods = passes, methods
        self.members: dict[tuple[object, ...], ClippedLayer] = {}
        """Those that are no layers of the model, by what they are made of."""
        self.compared: set[tuple[object, ...]] = set()
        """Operations whose results for examples one by one were seen to be those for the batch."""

    def layer(self, module: nn.Module, member: ClippedLayer, *args: Any, **kwargs: Any) -> Any:
        """What stands in place of a layer's forward."""
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise UserError(
                f"Layer {member.name!r} ({type(module).__name__}) was called with {len(args) + len(kwargs)} arguments, "
                "and it is clipped for calls with its input alone: leave the others out, or freeze it."
            )
        names, values = member.group.names, member.rule.values()  # whole tensors now, if they are shards in between
        for place, value in zip(member.parameter_indices, values, strict=True):
            if place is None or value is None:
                continue
            if not isinstance(value, nn.Parameter):
                raise UserError(
                    f"Layer {member.name!r} of the attached model got a tensor in the place of its parameter "
                    f"{names[place]!r} (by functional_call, say), which cannot be clipped: compute it inside a "
                    "module (torch.nn.utils.parametrize)."
                )
            if value.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Layer {member.name!r} got {names[place]!r} in {value.dtype}, in which a clipped sum may "
                    "outgrow its threshold: let fully_shard keep float32 (no param_dtype), and use autocast for speed."
                )
        x = args[0] if args else next(iter(kwargs.values()))
        return self.run(member, member.rule.prepare(x), values)

    def run(self, member: ClippedLayer, x: Tensor, values: Values, layout: Layout | None = None) -> Tensor:
        """A layer's output for an input x, with its parameters' values; `layout` where it is known already."""
        if isinstance(x, PerExample):
            return PerExample.of_rows(self._run_rows(member, x.rows, values), self._output_of(member))
        running = self.passes.current
        if running.examples == 1 and _lacks_batch(member.rule, x):  # squeezed away
            return self.run(member, x.unsqueeze(0), values, FIRST).squeeze(0)
        layout = layout or running.find(member.label, x)
        if member.group.direct and layout != FIRST:
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} without one row for each example on the first "
                "axis, and in shards (direct=True) no other layout is possible: do without fully_shard."
            )
        if layout.shared:
            return self._without_batch(member, x, values)
        if layout.axis and (layout.each > 1 or not member.rule.features_last):
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} with the batch on axis {layout.axis}: this "
                "type of layer is clipped with the batch on its first axis."
            )
        return self._apply(member, layout, x, values)

    def _apply(self, member: ClippedLayer, layout: Layout, x: Tensor, values: Values) -> Tensor:
        shards = values if member.group.direct else []
        if torch.is_autocast_enabled(x.device.type):
            x, values = autocast(member.rule.autocast, x, [] if shards else values)
        report, probe = enter(self.passes.current, member, layout)
        y: Tensor = LayerFunction.apply(report, member.rule, values, probe, x, *shards)
        return y

    def _run_rows(self, member: ClippedLayer, rows: Tensor, values: Values) -> Tensor:
        """The output for each example's own input, rows (B, ...)."""
        batch, each = len(rows), rows.shape[1] if member.rule.has_batch(rows.dim() - 1) else 0
        alike = each > 1 and rows.stride(1) == 0  # a parameter that was expanded: one stands for all
        if each:
            rows = (rows[:, :1] if alike else rows).flatten(0, 1)
        layout = FIRST if each < 2 or alike else Layout(0, each)
        y = self._apply(member, layout, rows, values)
        y = y.unflatten(0, (batch, -1)) if each else y
        return y.expand(-1, each, *y.shape[2:]) if alike else y

    def _without_batch(self, member: ClippedLayer, x: Tensor, values: Values) -> PerExample:
        """The output for an input that all examples share; it has a copy for each of them once it is used."""
        with torch.no_grad():
            inputs, lowered = autocast(member.rule.autocast, x, values)
            like, _ = member.rule.forward(inputs, *lowered)
        made: list[Tensor] = []
        rows = x.unsqueeze(0).expand(self.passes.current.examples, *x.shape)

        def make() -> Tensor:
            if not made:
                made.append(self._run_rows(member, rows, values))
            return made[0]

        return PerExample(make, like, self._output_of(member))

    def _output_of(self, member: ClippedLayer) -> "GroupOrigin":
        return GroupOrigin(self, f"The output of layer {member.name!r}")


class GroupOrigin:
    """The origin of a `PerExample`: what a layer made of an input without a batch axis, or a parameter.

    Args:
        calls: of the engine's layers.
        label: the layer's or parameter's name, for messages.
    """

    def __init__(self, calls: LayerCalls, label: str) -> None:
        self.calls, self.label, self.compared = calls, label, calls.compared

    @property
    def traces(self) -> bool:
        """Whether the forward pass is one of the trace, in which nothing is clipped."""
        return self.calls.passes.current.traces

    def find(self, x: Tensor, meets: bool = True) -> Layout:
        """Where a plain tensor that meets the `PerExample` holds the batch; `meets`: in an operation without a rule."""
        return self.calls.passes.current.find(self.label, x, meets)


class ParameterUse(GroupOrigin):
    """A parameter that modules may read by themselves while the model runs: the origin of a `PerExample`.

    Args:
        calls: of the engine's layers.
        group: of the parameter.
        place: its own there.
        parameter: itself.
        label: its name in the model.
    """

    def __init__(
        self, calls: LayerCalls, group: ClippingGroup, place: int, parameter: nn.Parameter, label: str
    ) -> None:
        super().__init__(calls, f"Parameter {label!r}")
        self.group, self.place, self.parameter = group, place, parameter

    def copies(self) -> Tensor:
        """(B, *shape), made once a forward pass."""
        group, place, running, members = self.group, self.place, self.calls.passes.current, self.calls.members
        key = ("parameter", group.index, place)
        if key not in members:
            home, local = group.homes[place]
            if self.parameter.numel() > COPIED and running.examples > 1:
                warnings.warn(
                    f"groupwise has no rule for what is done with {local} of {type(home).__name__}: it is clipped "
                    "exactly, with a gradient for each example in memory. Linear maps (F.linear, @) need none.",
                    stacklevel=2,
                )
            members[key] = ClippedLayer(group, group.names[place], ParameterRule(home, local), (place,), (None,))
        group_pass = running.groups.get(group.index)
        if group_pass is None or place not in group_pass.copies:
            report, probe = enter(running, members[key], FIRST)
            made = self.parameter.detach().unsqueeze(0).expand(running.examples, *self.parameter.shape)
            running.groups[group.index].copies[place] = ReportFunction.apply(report, [], probe, made)
        return running.groups[group.index].copies[place]

    def pairs(self, bias: PerExample) -> bool:
        """Whether a bias may be that of a product with this parameter: a parameter of the same group."""
        return isinstance(bias.origin, ParameterUse) and bias.origin.group is self.group

    def linear(self, weight: PerExample, x: Tensor, bias: PerExample | None, layout: Layout | None) -> Tensor:
        """x Wᵀ + b by the rule of such layers; W is this parameter, rows of it or its transpose."""
        member, values = self._layer(HFConv1DRule if weight.transposed else LinearRule, weight, bias)
        return self.calls.run(member, x, values, layout)

    def embedding(self, weight: PerExample, x: Tensor, padding_idx: int | None, layout: Layout) -> Tensor:
        """The rows that x says, by the rule of such layers."""
        member, values = self._layer(EmbeddingRule, weight, None, padding_idx)
        return self.calls.run(member, x, values, layout)

    def late(
        self, weight: PerExample, bias: PerExample | None, like: Tensor, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The values of W and b, and zeros (B, T, p) whose gradient is that of x Wᵀ + b for the inputs x (B, T, d) that
        are first in the list by then; `like` (B, T, ...) holds the examples as x does."""
        member, (w, b) = self._layer(LinearRule, weight, bias)
        layout = self.find(like, meets=False)
        report, probe = enter(self.calls.passes.current, member, layout)
        assert w is not None
        zeros = like.new_zeros(()).expand(*like.shape[:2], len(w))
        return w, b, ReportFunction.apply(report, inputs, probe, zeros)

    def _layer(
        self, kind: type[LayerRule], weight: PerExample, bias: PerExample | None, padding_idx: int | None = None
    ) -> tuple[ClippedLayer, Values]:
        """A layer of single parameters, or of rows of them, made when they are first used so; and their values.

        Args:
            kind: its rule: `LinearRule`, `HFConv1DRule` (linear, with a weight (d, p)) or `EmbeddingRule`.
            weight: its weight.
            bias: its bias, if that trains; a parameter of the same group.
            padding_idx: of an embedding.
        """
        parameters = (weight,) if kind is EmbeddingRule else (weight, bias)
        places = tuple(None if each is None else each.origin.place for each in parameters)
        rows = tuple(None if each is None else each.part for each in parameters)
        wholes: Values = [None if each is None else each.origin.parameter.detach() for each in parameters]
        values = [t if t is None or part is None else t[part] for t, part in zip(wholes, rows, strict=True)]
        key = (kind, self.group.index, places, *((part.start, part.stop) for part in rows if part), padding_idx)
        if key not in self.calls.members:
            n, m = weight.origin.parameter[rows[0] or slice(None)].shape
            with torch.device("meta"):
                module = nn.Embedding(n, m, padding_idx) if kind is EmbeddingRule else nn.Linear(m, n, bias is not None)
            rule = kind(module, self.calls.methods.for_layer())
            self.calls.members[key] = ClippedLayer(self.group, self.group.names[self.place], rule, places, rows)
        return self.calls.members[key], values


def _lacks_batch(rule: LayerRule, x: Tensor) -> bool:
    if rule.features_last:
        return x.dim() == 1 and x.is_floating_point()
    return rule.has_batch(x.dim() + 1) and not rule.has_batch(x.dim())
