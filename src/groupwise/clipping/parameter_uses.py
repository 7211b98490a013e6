"""Leads the uses of single parameters to their groups: products and embeddings by the rules of such layers."""

from torch import Tensor, nn

from groupwise.clipping.autograd import LateFunction
from groupwise.clipping.calls import GroupOrigin, LayerCalls, Use, Values
from groupwise.clipping.groups import ClippedLayer, ClippingGroup
from groupwise.clipping.layouts import Layout
from groupwise.clipping.per_example import PerExample


class ParameterUse(GroupOrigin):
    """A parameter that modules may read by themselves while the model runs: the origin of a `PerExample`."""

    def __init__(
        self, calls: LayerCalls, group: ClippingGroup, place: int, parameter: nn.Parameter, label: str
    ) -> None:
        super().__init__(calls, group, f"Parameter {label!r}")
        self.place, self.parameter = place, parameter

    def copies(self) -> Tensor:
        """(B, *shape), made once a forward pass."""
        return self.calls.copies(self.group, self.place)

    def pairs(self, bias: PerExample) -> bool:
        """Whether a bias may be that of a product with this parameter: a parameter of the same group."""
        return isinstance(bias.origin, ParameterUse) and bias.origin.group is self.group

    def linear(self, weight: PerExample, x: Tensor, bias: PerExample | None, layout: Layout | None) -> Tensor:
        """x Wᵀ + b by the rule of such layers; W is this parameter, rows of it or its transpose."""
        member, values = self._product("transposed" if weight.transposed else "linear", weight, bias)
        return self.calls.run(self.group, member, x, values, layout)

    def embedding(self, weight: PerExample, x: Tensor, padding_idx: int | None, layout: Layout) -> Tensor:
        """The rows that x says, by the rule of such layers."""
        member, values = self._product("embedding", weight, None, padding_idx)
        return self.calls.run(self.group, member, x, values, layout)

    def bags(
        self, weight: PerExample, x: Tensor, counts: Tensor | None, padding_idx: int | None, layout: Layout
    ) -> Tensor:
        """The sums (B, d) of the rows that x (B, L) says times their counts, by `BagRule`."""
        member, values = self._product("bags", weight, None, padding_idx)
        return self.calls.run(self.group, member, x, [values[0], counts], layout).squeeze(1)

    def late(
        self, weight: PerExample, bias: PerExample | None, like: Tensor, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The values of W and b, and zeros (B, T, p) whose gradient is that of x Wᵀ + b for the inputs x (B, T, d) that
        are in the list by then; `like` (B, T, ...) holds the examples as x does."""
        member, (w, b) = self._product("linear", weight, bias)
        layout = self.find(like, meets=False)
        group_pass, probe = self.calls.enter(self.group, member, like.device)
        assert w is not None
        zeros = like.new_zeros(()).expand(*like.shape[:2], len(w))
        return w, b, LateFunction.apply(group_pass, member, layout, probe, inputs, zeros)

    def _product(
        self, kind: str, weight: PerExample, bias: PerExample | None, padding_idx: int | None = None
    ) -> tuple[ClippedLayer, Values]:
        """The member of the group that a product belongs to, and the values of its parameters."""
        uses: list[Use | None] = []
        values: Values = []
        for each in (weight, bias) if kind in ("linear", "transposed") else (weight,):
            if each is None:
                values.append(None)
                uses.append(None)
                continue
            whole: Tensor = each.origin.parameter.detach()
            value = whole if each.part is None else whole[each.part]
            values.append(value)
            uses.append(Use(each.origin.place, value.shape, each.part, padding_idx))
        return self.calls.product(kind, self.group, tuple(uses)), values
