"""Runs each layer call inside its group, in the current pass.

A group may also have members that are not layers of the model: a parameter that a module uses directly, and linear maps
and embeddings inside a module's forward. They are created at their first use.
"""

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.clip_plan import FIRST, Layout, Order
from groupwise.clipping.group_pass import Report, enter
from groupwise.clipping.groups import ClippedLayer, ClippingGroup
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.partition import Layer
from groupwise.clipping.passes import Passes
from groupwise.clipping.per_example import PerExample
from groupwise.clipping.precision import autocast, no_autocast
from groupwise.clipping.rules.base import LayerRule, ParameterRule, in_format_of
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.linear import HFConv1DRule, LinearRule
from groupwise.errors import UserError

Values = list[Tensor | None]
"""The values of a layer's parameters, in the order of its rule's `parameter_names`."""


COPIED = 4096
"""Entries of a parameter up to which a copy per example is cheap, so that there is no warning."""


class LayerCalls:
    """Runs the calls of an engine's layers."""

    def __init__(self, passes: Passes, methods: NormMethods) -> None:
        self.passes, self.methods = passes, methods
        self.members: dict[tuple[object, ...], ClippedLayer] = {}
        """Members that are not layers of the model, by rule and parameters."""
        self.compared: set[tuple[object, ...]] = set()
        """Operations that were compared: example by example they give the same result as on the batch."""

    def layer(self, module: nn.Module, member: ClippedLayer, *args: Any, **kwargs: Any) -> Any:
        """Replaces a layer's forward during a pass."""
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise UserError(
                f"Layer {member.name!r} ({type(module).__name__}) was called with {len(args) + len(kwargs)} arguments, "
                "and only calls with its input alone can be clipped: leave the others out, or freeze it."
            )
        names, values = member.rule.parameter_names, member.rule.values()  # sharded parameters are whole tensors here
        for name, trains, value in zip(names, member.wanted, values, strict=True):
            if not trains or value is None:
                continue
            if not isinstance(value, nn.Parameter):
                raise UserError(
                    f"Layer {member.name!r} got a tensor instead of its parameter {name!r} (by functional_call, say), "
                    "so its gradient cannot be clipped: compute the weight inside a module "
                    "(torch.nn.utils.parametrize)."
                )
            if value.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"Layer {member.name!r} got its {name!r} in {value.dtype}, in which rounding may push a clipped "
                    "sum above its threshold: keep the model in float32 (fully_shard without param_dtype), and use "
                    "autocast."
                )
        x = args[0] if args else next(iter(kwargs.values()))
        return self.run(member, member.rule.prepare(x), values)

    def run(self, member: ClippedLayer, x: Tensor, values: Values, layout: Layout | None = None) -> Tensor:
        """A layer's output for an input x and its parameters' values; `layout`, if it is already known."""
        if isinstance(x, PerExample):
            return PerExample.of_rows(self._run_rows(member, x.rows, values), self._output_of(member))
        running = self.passes.current
        if running.examples == 1 and _lacks_batch(member.rule, x):  # squeeze() removed the batch axis
            return self.run(member, x.unsqueeze(0), values, FIRST).squeeze(0)
        layout = layout or running.find(member.label, x)
        if member.group.direct and layout != FIRST:
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} without one row for each example on the first "
                "axis, and sharded parameters (direct=True) allow no other layout: do without fully_shard."
            )
        if layout.order is Order.SHARED:
            return self._without_batch(member, x, values)
        if layout.axis and (layout.rows_per_example > 1 or not member.rule.features_last):
            raise UserError(
                f"{member.label} got a tensor of shape {tuple(x.shape)} with the batch on axis {layout.axis}: this "
                "type of layer is clipped with the batch on its first axis."
            )
        shards = values if member.group.direct else []
        if torch.is_autocast_enabled(x.device.type):
            x, values = autocast(member.rule.autocast, x, [] if shards else values)
        report = enter(running, member, layout)
        y: Tensor = LayerFunction.apply(report, member.rule, values, self.passes.anchor, x, *shards)
        return y

    def _run_rows(self, member: ClippedLayer, rows: Tensor, values: Values) -> Tensor:
        """The output for inputs that differ by example, rows (B, ...)."""
        batch, each = len(rows), rows.shape[1] if member.rule.has_batch(rows.dim() - 1) else 0
        alike = each > 1 and rows.stride(1) == 0  # an expanded parameter: all its rows are the same
        if each:
            rows = (rows[:, :1] if alike else rows).flatten(0, 1)
        layout = FIRST if each < 2 or alike else Layout(0, each)
        y = self.run(member, rows, values, layout)
        y = y.unflatten(0, (batch, -1)) if each else y
        return y.expand(-1, each, *y.shape[2:]) if alike else y

    def _without_batch(self, member: ClippedLayer, x: Tensor, values: Values) -> PerExample:
        """The output for an input that all examples share; its copies, one per example, are made when it is used."""
        with torch.no_grad():
            inputs, lowered = autocast(member.rule.autocast, x, values)
            like, _ = member.rule.forward(inputs, *lowered)
        rows = x.unsqueeze(0).expand(self.passes.current.examples, *x.shape)
        return PerExample(cache(lambda: self._run_rows(member, rows, values)), like, self._output_of(member))

    def _output_of(self, member: ClippedLayer) -> "GroupOrigin":
        return GroupOrigin(self, f"The output of layer {member.name!r}")


class LayerFunction(torch.autograd.Function):
    """A layer's forward and input gradient; its group computes the gradients of its parameters.

    Parameters are passed in a list, because autograd does not track tensors in lists. Sharded parameters are passed
    as separate arguments, and get their gradients from here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        report: Report,
        rule: LayerRule,
        parameters: list[Tensor | None],
        anchor: Tensor,
        x: Tensor,
        *shards: Tensor | None,
    ) -> Tensor:
        ctx.report, ctx.rule, ctx.shards = report, rule, len(shards)
        if shards:
            _, parameters = autocast(rule.autocast, x, list(shards))  # cast here, so that gradients stay float32
        with no_autocast(x.device.type):
            y, saved = rule.forward(x, *parameters)
        ctx.save_for_backward(*saved)
        return _changeable(y, (x, *saved)) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.rule
        g = g.contiguous() if rule.features_last or not saved else in_format_of(saved[0], g)
        gx, saved = rule.begin_backward(saved, g, ctx.needs_input_grad[4])
        sums = ctx.report(saved, g)
        return None, None, None, None, gx, *(sums or (None,) * ctx.shards)


def _changeable(y: Tensor, kept: tuple[Tensor | None, ...]) -> Tensor:
    """Make an output that is a view safe to change in place: copy it if backward needs the same memory."""
    memory = y.untyped_storage().data_ptr()
    if any(t is not None and t.untyped_storage().data_ptr() == memory for t in kept):
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class ReportFunction(torch.autograd.Function):
    """Puts a tensor into the graph, and reports its gradient to a layer of the group as that layer's output gradient.

    The tensor may be copies of a parameter, one per example: their gradients are the per-example gradients. Or it may
    be zeros (B, T, p) that are added to the T products of a recurrent weight: their gradients, together with the T
    inputs (B, T, d), are those of one linear layer on a sequence.
    """

    @staticmethod
    def forward(ctx: Any, report: Report, saved: list[Any], anchor: Tensor, made: Tensor) -> Tensor:
        ctx.report, ctx.saved = report, saved
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.report(tuple(ctx.saved), g)
        return None, None, None, None


class GroupOrigin:
    """Where a `PerExample` comes from: a parameter, or the output of a layer whose input has no batch axis.

    Its label names it in messages.
    """

    def __init__(self, calls: LayerCalls, label: str) -> None:
        self.calls, self.label, self.compared = calls, label, calls.compared

    @property
    def traces(self) -> bool:
        """Whether the current forward pass is part of a trace, in which nothing is clipped."""
        return self.calls.passes.current.traces

    def find(self, x: Tensor, meets: bool = True) -> Layout:
        """The layout of a plain tensor combined with the `PerExample`; `meets`: in an operation without a rule."""
        return self.calls.passes.current.find(self.label, x, meets)


class ParameterUse(GroupOrigin):
    """A parameter that a module may use directly in its forward; `local` is its name in a layer that owns it."""

    def __init__(self, calls: LayerCalls, group: ClippingGroup, layer: Layer, local: str) -> None:
        self.name, self.group, self.module, self.local = layer.full_name(local), group, layer.module, local
        self.parameter = layer.trainable[local]
        super().__init__(calls, f"Parameter {self.name!r}")

    def copies(self) -> Tensor:
        """One copy per example, (B, *shape), made once per forward pass."""
        parameter, running, members = self.parameter, self.calls.passes.current, self.calls.members
        index, key = self.group.index, (id(parameter),)
        if key not in members:
            if parameter.numel() > COPIED and running.examples > 1:
                warnings.warn(
                    f"groupwise has no rule for the operation on {self.local} of {type(self.module).__name__}: it is "
                    "clipped exactly, with a gradient for each example in memory. Linear maps (F.linear, @) need no "
                    "rule.",
                    stacklevel=2,
                )
            rule = ParameterRule(self.module, self.local)
            members[key] = ClippedLayer(self.group, self.name, rule, (parameter,), (None,))
        if index not in running.groups or parameter not in running.groups[index].copies:
            report = enter(running, members[key], FIRST)
            made = parameter.detach().unsqueeze(0).expand(running.examples, *parameter.shape)
            running.groups[index].copies[parameter] = ReportFunction.apply(report, [], self.calls.passes.anchor, made)
        return running.groups[index].copies[parameter]

    def linear(self, weight: PerExample, x: Tensor, bias: PerExample | None, layout: Layout | None) -> Tensor:
        """x Wᵀ + b by the rule of linear layers; W is this parameter, rows of it or its transpose."""
        member, values = self._layer(HFConv1DRule if weight.transposed else LinearRule, weight, bias)
        return self.calls.run(member, x, values, layout)

    def embedding(self, weight: PerExample, x: Tensor, padding_idx: int | None, layout: Layout) -> Tensor:
        """The rows with the indices x, by the rule of embeddings."""
        member, values = self._layer(EmbeddingRule, weight, None, padding_idx)
        return self.calls.run(member, x, values, layout)

    def stepwise_linear(
        self, weight: PerExample, bias: Tensor | None, like: Tensor, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The values of W and b, and zeros (B, T, p) to add to T products x Wᵀ + b, whose gradients are clipped as one.

        W (p, d) is this parameter or rows of it. A bias (p,) that its rule cannot take is returned unchanged. `like`,
        (B, T, ...), has the layout of x. The caller puts x, (B, T, d), into `inputs` before the backward pass.
        """
        paired = bias if isinstance(bias, PerExample) and weight.pairs(bias) else None
        member, (w, b) = self._layer(LinearRule, weight, paired)
        layout = self.find(like, meets=False)
        report = enter(self.calls.passes.current, member, layout)
        assert w is not None
        zeros = like.new_zeros(()).expand(*like.shape[:2], len(w))
        return w, bias if paired is None else b, ReportFunction.apply(report, inputs, self.calls.passes.anchor, zeros)

    def _layer(
        self, kind: type[LayerRule], weight: PerExample, bias: PerExample | None, padding_idx: int | None = None
    ) -> tuple[ClippedLayer, Values]:
        """A member for single parameters, or rows of them, created at its first use; and the parameters' values.

        Its rule is `LinearRule`, `HFConv1DRule` (linear, with a weight (d, p)) or `EmbeddingRule`; its bias is a
        parameter of the same group.
        """
        used = (weight,) if kind is EmbeddingRule else (weight, bias)
        parameters = tuple(None if each is None else each.origin.parameter for each in used)
        rows = tuple(None if each is None else each.part for each in used)
        wholes: Values = [None if p is None else p.detach() for p in parameters]
        values = [t if t is None or part is None else t[part] for t, part in zip(wholes, rows, strict=True)]
        key = (kind, *map(id, parameters), *((part.start, part.stop) for part in rows if part), padding_idx)
        if key not in self.calls.members:
            n, m = self.parameter[rows[0] or slice(None)].shape
            with torch.device("meta"):
                module = nn.Embedding(n, m, padding_idx) if kind is EmbeddingRule else nn.Linear(m, n, bias is not None)
            rule = kind(module, replace(self.calls.methods))
            self.calls.members[key] = ClippedLayer(self.group, self.name, rule, parameters, rows)
        return self.calls.members[key], values


def _lacks_batch(rule: LayerRule, x: Tensor) -> bool:
    if rule.features_last:
        return x.dim() == 1 and x.is_floating_point()
    return rule.has_batch(x.dim() + 1) and not rule.has_batch(x.dim())
