"""What a forward pass knows of its examples, and what a parameter, or a layer's output without a batch, asks it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from groupwise.clipping.gate import GroupState
from groupwise.clipping.layouts import BatchAxis
from groupwise.clipping.parts import Use
from groupwise.clipping.per_example import PerExample


class Call:
    """A call of the outermost module: how many examples it has, and which tensors it was given."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> None:
        self.given = set()
        self.batch: int | None = None
        packed = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedSequence)), None)
        if packed is not None:
            self.batch = int(packed.batch_sizes[0])
        for leaf in _tensors((args, kwargs)):
            if self.batch is None and leaf.dim() > axis:
                self.batch = leaf.shape[axis]
            if leaf.numel():
                self.given.add(leaf.untyped_storage().data_ptr())

    def is_given(self, x: Tensor) -> bool:
        """Whether x is one of the tensors, or a view of one."""
        return x.untyped_storage().data_ptr() in self.given


class ParameterUse:
    """A parameter that modules may read by themselves, while the outermost module runs; a `per_example.Origin`."""

    def __init__(self, patches: Any, group: GroupState, place: int, parameter: nn.Parameter, label: str) -> None:
        self.patches, self.group, self.place, self.parameter = patches, group, place, parameter
        self.label = f"Parameter {label!r}"

    def copies(self) -> Tensor:
        """(B, *shape), made once a forward pass."""
        return self.patches.parts.copies(self.group, self.place, self.patches.batch(self.label))

    def batch_axis_of(self, x: Tensor) -> BatchAxis | None:
        """See `per_example.Origin`."""
        return self.patches.batch_axis_of(x, self.label)

    def doubt(self, x: Tensor, place: BatchAxis) -> None:
        """See `per_example.Origin`."""
        self.patches.doubt(self.group, self.label, x, place)

    def linear(self, x: Tensor, bias: PerExample | None) -> Tensor | None:
        """See `per_example.Origin`."""
        other = None if bias is None else bias.origin
        if self.parameter.dim() != 2 or (other is not None and getattr(other, "group", None) is not self.group):
            return None
        uses: list[Use | None] = [Use(self.place, self.parameter.shape), None]
        values: list[Tensor | None] = [self.parameter.detach(), None]
        if isinstance(other, ParameterUse):
            uses[1], values[1] = Use(other.place, other.parameter.shape), other.parameter.detach()
        return self.patches.run(self.group, self.patches.parts.member("linear", self.group, tuple(uses)), x, values)

    def embedding(self, x: Tensor, padding_idx: int | None) -> Tensor | None:
        """See `per_example.Origin`."""
        if self.parameter.dim() != 2:
            return None
        use = Use(self.place, self.parameter.shape, padding_idx=padding_idx)
        member = self.patches.parts.member("embedding", self.group, (use,))
        return self.patches.run(self.group, member, x, [self.parameter.detach()])


class LayerOutput:
    """What a layer made of an input without a batch axis; a `per_example.Origin`."""

    def __init__(self, patches: Any, group: GroupState, label: str) -> None:
        self.patches, self.group, self.label = patches, group, f"The output of layer {label!r}"

    def batch_axis_of(self, x: Tensor) -> BatchAxis | None:
        """See `per_example.Origin`."""
        return self.patches.batch_axis_of(x, self.label)

    def doubt(self, x: Tensor, place: BatchAxis) -> None:
        """See `per_example.Origin`."""
        self.patches.doubt(self.group, self.label, x, place)

    def linear(self, x: Tensor, bias: PerExample | None) -> None:
        """It is no parameter."""

    def embedding(self, x: Tensor, padding_idx: int | None) -> None:
        """It is no parameter."""


def _tensors(nested: Any) -> Iterable[Tensor]:
    """All tensors of nested arguments, in order; of mappings that torch does not know too."""
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
