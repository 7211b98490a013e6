"""Leads the uses of single parameters to their groups: by a module itself, and by a module's re-expressed forward.

A parameter that a module reads becomes a `PerExample` whose products with `F.linear` and `F.embedding` go by the rules
of such layers. A module that is rewritten in plain operations gets its weights from `ModuleWeights`, and each product
becomes a linear layer or an embedding of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.autograd import LateFunction
from groupwise.clipping.calls import GroupOrigin, LayerCalls, Use, Values
from groupwise.clipping.groups import ClippingGroup, Member
from groupwise.clipping.layouts import FIRST, Layout
from groupwise.clipping.per_example import PerExample
from groupwise.errors import UserError

Rows = slice | None


class ParameterUse(GroupOrigin):
    """A parameter that modules may read by themselves, while the outermost module runs; a `per_example.Parameter`."""

    def __init__(
        self, calls: LayerCalls, group: ClippingGroup, place: int, parameter: nn.Parameter, label: str
    ) -> None:
        super().__init__(calls, group, f"Parameter {label!r}")
        self.place, self.parameter = place, parameter

    def copies(self) -> Tensor:
        """(B, *shape), made once a forward pass."""
        return self.calls.copies(self.group, self.place)

    def linear(self, x: Tensor, bias: PerExample | None, transposed: bool, layout: Layout) -> Tensor | None:
        """See `per_example.Parameter`."""
        other = None if bias is None else bias.origin
        if self.parameter.dim() != 2 or not (
            other is None or (isinstance(other, ParameterUse) and other.group is self.group)
        ):
            return None
        uses: list[Use | None] = [Use(self.place, self.parameter.shape), None]
        values: list[Tensor | None] = [self.parameter.detach(), None]
        if isinstance(other, ParameterUse):
            uses[1], values[1] = Use(other.place, other.parameter.shape), other.parameter.detach()
        member = self.calls.product("transposed" if transposed else "linear", self.group, tuple(uses))
        return self.calls.run(self.group, member, x, values, layout)

    def embedding(self, x: Tensor, padding_idx: int | None, layout: Layout) -> Tensor | None:
        """See `per_example.Parameter`."""
        if self.parameter.dim() != 2:
            return None
        use = Use(self.place, self.parameter.shape, padding_idx=padding_idx)
        member = self.calls.product("embedding", self.group, (use,))
        return self.calls.run(self.group, member, x, [self.parameter.detach()], layout)


class ModuleWeights:
    """A `groupwise.clipping.rules.weights.Weights` for one call of a module.

    Args:
        module: the module.
        calls: of the engine's layers.
    """

    def __init__(self, module: nn.Module, calls: LayerCalls) -> None:
        self._module, self._calls = module, calls

    def linear(self, x: Tensor, weight: str, bias: str | None, rows: Rows = None, bias_rows: Rows = None) -> Tensor:
        """x W[rows]ᵀ + b[rows], (B, ..., d) -> (B, ..., p); `bias_rows` where the bias alone is used in part."""
        group, member, values = self._product("linear", [(weight, rows), (bias, bias_rows or rows)])
        if group is None or member is None:
            return F.linear(x, *values)  # type: ignore[arg-type]
        y: Tensor = self._calls.run(group, member, x, values)
        return y

    def embedding(self, x: Tensor, weight: str, padding_idx: int | None) -> Tensor:
        """Rows of a table, integers (B, ...) -> (B, ..., d); the row `padding_idx` gets no gradient."""
        group, member, values = self._product("embedding", [(weight, None)], padding_idx)
        if group is None or member is None:
            return F.embedding(x, values[0], padding_idx)  # type: ignore[arg-type]
        y: Tensor = self._calls.run(group, member, x, values)
        return y

    def bags(self, x: Tensor, counts: Tensor | None, weight: str, padding_idx: int | None) -> Tensor:
        """Sums of rows of a table, integers x (B, L) -> (B, d), each times its count (B, L); not of `padding_idx`."""
        group, member, values = self._product("bags", [(weight, None)], padding_idx)
        if group is None or member is None:
            return F.embedding_bag(x, values[0], mode="sum", per_sample_weights=counts, padding_idx=padding_idx)  # type: ignore[arg-type]
        layout = self._calls.find(member.label, x)
        if layout.shared:
            rows = self.embedding(x, weight, padding_idx)
            if padding_idx is not None:  # an embedding leaves out its gradient alone
                rows = rows.masked_fill((x == padding_idx).unsqueeze(2), 0)
            return (rows if counts is None else rows * counts.unsqueeze(2)).sum(1)
        y: Tensor = self._calls.run(group, member, x, [*values, counts], layout)
        return y.squeeze(1)

    def late_linear(self, weight: str, bias: str | None, steps: int, like: Tensor) -> "LateLinear":
        """The uses of a weight in `steps` steps, for a batch, dtype and device like those of `like` (B, ...)."""
        group, member, values = self._product("linear", [(weight, None), (bias, None)])
        if torch.is_autocast_enabled(like.device.type):
            dtype = torch.get_autocast_dtype(like.device.type)
            values = [None if value is None else value.to(dtype) for value in values]
        return LateLinear(self._calls, group, member, values, steps, like)

    def each(self, name: str, batch: int) -> Tensor:
        """A parameter's copies, one for each of the batch's rows: (B, *shape)."""
        parameter = self._find(name)
        assert parameter is not None
        found = self._calls.place_of(parameter)
        if found is None:
            return parameter.detach().unsqueeze(0).expand(batch, *parameter.shape)
        copies: Tensor = self._calls.copies(*found)
        return copies.repeat_interleave(batch // len(copies), 0)

    def _find(self, name: str | None) -> nn.Parameter | None:
        if name is None:
            return None
        owner, _, local = name.rpartition(".")
        holder = self._module.get_submodule(owner)
        if local not in holder._parameters:
            raise UserError(
                f"{type(self._module).__name__} computes its {name!r} (by weight_norm, say), and its weights must be "
                "parameters: take the computation off, or freeze them."
            )
        return holder._parameters[local]

    def _product(
        self, kind: str, names: list[tuple[str | None, Rows]], padding_idx: int | None = None
    ) -> tuple[ClippingGroup | None, Member | None, Values]:
        """The group and member that a product belongs to, if any of its parameters trains, and their values."""
        uses: list[Use | None] = []
        values: Values = []
        groups: list[ClippingGroup] = []
        for name, rows in names:
            parameter = self._find(name)
            if parameter is None:
                uses.append(None)
                values.append(None)
                continue
            value = parameter.detach() if rows is None else parameter.detach()[rows]
            found = self._calls.place_of(parameter)
            if found is not None:
                groups.append(found[0])
            uses.append(Use(found and found[1], value.shape, rows, padding_idx))
            values.append(value)
        if not groups:
            return None, None, values
        if any(group is not groups[0] for group in groups):
            raise UserError(
                f"{type(self._module).__name__} has {names[0][0]!r} and {names[1][0]!r} in two clipping groups: put "
                "the weight and the bias of one product into the same group."
            )
        return groups[0], self._calls.product(kind, groups[0], tuple(uses)), values


class LateLinear:
    """A `groupwise.clipping.rules.weights.Late`: products whose inputs are known one after the other."""

    def __init__(
        self,
        calls: LayerCalls,
        group: ClippingGroup | None,
        member: Member | None,
        values: Values,
        steps: int,
        like: Tensor,
    ) -> None:
        weight, self.bias = values
        assert weight is not None
        self.weight = weight
        self.added: Tensor | None = None
        self._inputs: list[Tensor] = []
        if group is None or member is None:
            return
        layout = calls.find(member.label, like)
        if calls.traces:  # in which it may be the answer of an earlier round
            layout = FIRST
        if layout.shared:
            raise UserError(
                f"Layer {member.name!r} got a sequence of shape {tuple(like.shape)} that is the same for all examples: "
                "expand it to the batch."
            )
        group_pass, probe = calls.enter(group, member, like.device)
        zero = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape[0], steps, len(weight))
        self.added = LateFunction.apply(group_pass, member, layout, probe, self._inputs, zero)

    def note(self, x: Tensor) -> None:
        """Keep the inputs of all steps, (B, T, d), for the gradient; once, before the backward pass."""
        if self.added is not None:
            self._inputs.append(x)
