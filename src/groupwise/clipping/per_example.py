"""Gives every example its own copy of a parameter, behind a tensor of the parameter's shape.

If a module uses a parameter directly (`x * self.scale`, `torch.cat([self.token, x], 1)`), there is no layer call whose
rule could separate the examples' gradients. The engine then replaces the parameter by a `PerExample`. To the module it
has the parameter's shape, but it holds B equal copies, one per example (expanded, so that they take no memory).
Operations on it alone apply to all B copies. When it is combined with a tensor that has a batch axis, example i uses
copy i. So the gradient of the copies, (B, *shape), is the per-example gradient, for any operation.

Operations that have a rule (linear maps, embeddings) use it, without a gradient per copy (`products.py`). `in_place_of`
registers functions that consist of such operations.

The output of a layer whose input has no batch axis, such as `wpe(torch.arange(T))`, is a `PerExample` too.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from groupwise.clipping.clip_plan import Layout, Order
from groupwise.clipping.example_by_example import example_by_example, for_examples
from groupwise.errors import UserError


class PerExample(torch.Tensor):
    """B tensors that look like one; see the module docstring.

    Args:
        make: returns the copies, (B, *shape); called when they are first needed.
        like: a tensor with the shape, dtype and device to show.
        origin: the parameter or layer that it comes from, a `calls.GroupOrigin`.
        source: whether it is a parameter, or some rows of one, and not computed.
        transposed: whether it is the transpose of such a matrix.
        part: the parameter's rows that it consists of; None: all.
    """

    make: Callable[[], Tensor]
    origin: Any
    like: Tensor
    source: bool
    transposed: bool
    part: slice | None

    @staticmethod
    def __new__(
        cls: type["PerExample"],
        make: Callable[[], Tensor],
        like: Tensor,
        origin: Any,
        source: bool = False,
        transposed: bool = False,
        part: slice | None = None,
    ) -> "PerExample":
        differentiable = like.is_floating_point() or like.is_complex()
        self: PerExample = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=differentiable
        )  # so that the graph of a torch.autograd.Function, which is not dispatched, leads to this tensor
        self.make, self.origin, self.like = make, origin, like
        self.source, self.transposed, self.part = source, transposed, part
        if source and not transposed and part is None:
            self._is_param = True  # so that isinstance(..., nn.Parameter) is true
        return self

    @property
    def rows(self) -> Tensor:
        """The copies, (B, *shape)."""
        return self.make()

    @property
    def is_matrix(self) -> bool:
        """Whether a rule can compute products with it."""
        return self.source and self.like.dim() == 2 and not self.like.is_complex() and self.like.numel() > 0

    def pairs(self, bias: Any) -> bool:
        """Whether one rule can take it and a bias: they are parameters of one group, or rows of these."""
        if not (self.source and isinstance(bias, PerExample) and bias.source and bias.like.dim() == 1):
            return False
        return len(bias.like) == len(self.like) and bias.origin.group is self.origin.group

    @classmethod
    def of_rows(cls, rows: Tensor, origin: Any) -> "PerExample":
        """From computed copies (B, *shape)."""
        return cls(lambda: rows, rows[0].detach(), origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its name and shape."""
        return f"PerExample({self.origin.label}, {tuple(self.like.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never reached: `__torch_function__` handles every operation before."""
        raise UserError(f"A parameter that a module uses directly went into {func}, which cannot be clipped.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation by a rule, or with every example's own copy."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = f"get {func.__self__.__name__}"
        if name in _DESCRIBES or (name.startswith("get ") and name not in _COMPUTED):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if not torch.is_grad_enabled() or name in _VALUES:
            args, kwargs = tree_map(_value, (args, kwargs))
            return func(*args, **kwargs)
        if func in _IN_PLACE_OF and (made := _IN_PLACE_OF[func](*args, **kwargs)) is not NotImplemented:
            return made
        if (made := _view_of_parameter(name, args, kwargs)) is not None:
            return made
        return _with_copies(func, name, *tree_flatten((args, kwargs)))


_Function = TypeVar("_Function", bound=Callable[..., Any])
_IN_PLACE_OF: dict[Callable[..., Any], Callable[..., Any]] = {}


def in_place_of(*functions: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorator that registers a replacement of torch functions which needs no copies. It takes the same arguments, and
    returns the same result or `NotImplemented`."""

    def register(made: _Function) -> _Function:
        _IN_PLACE_OF.update(dict.fromkeys(functions, made))
        return made

    return register


def refuse_unbatched(name: str, x: Tensor, axes: int) -> None:
    """Raise a `UserError` for an input without a batch axis, by its number of axes."""
    if x.dim() != axes:
        raise UserError(
            f"{name} got an input of shape {tuple(x.shape)} where {axes} axes were expected, one of them the batch: "
            "add it with unsqueeze, so that there is one loss for each example."
        )


def _with_copies(func: Any, name: str, leaves: list[Any], spec: Any) -> Any:
    """Run an operation with each example's own copy: the i-th copy with example i's rows of the other tensors."""
    mine = [leaf for leaf in leaves if isinstance(leaf, PerExample)]
    origin = mine[0].origin
    places = [_place(leaf, origin) for leaf in leaves]
    copies = {i: leaf.rows for i, leaf in enumerate(leaves) if isinstance(leaf, PerExample)}
    if not any(places):
        made = for_examples(func, leaves, spec, copies, name, origin.label)
        made = tree_map(lambda t: PerExample.of_rows(t, origin) if isinstance(t, Tensor) else t, made)
        return _of_the_batch(made) if name in _REPEATS else made
    if origin.traces or len(mine[0].rows) == 1:  # nothing is clipped, or there is only one example
        one = _value if origin.traces else lambda leaf: leaf.rows[0] if isinstance(leaf, PerExample) else leaf
        args, kwargs = tree_map(one, tree_unflatten(leaves, spec))
        return func(*args, **kwargs)
    changes = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    if changes and isinstance(leaves[0], PerExample):  # the copies would not change
        raise UserError(
            f"{origin.label}, or a tensor computed from it, is changed in place (by {name}) with values of the batch: "
            "use operations that are not in place."
        )
    ranks = [leaf.dim() for leaf in leaves if isinstance(leaf, Tensor)]
    if name in _BROADCASTS or (
        name in _PRODUCTS
        and min(ranks) > 2
        and all(place is None or place.axis < leaf.dim() - 2 for leaf, place in zip(leaves, places, strict=True))
    ):
        rank = max(ranks)
        leaf, found = next((leaf, p) for leaf, p in zip(leaves, places, strict=True) if p is not None)
        place = replace(found, axis=found.axis + rank - leaf.dim())
        aligned = [_align(leaf, rank, place, name) if isinstance(leaf, PerExample) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(aligned, spec)
        return func(*args, **kwargs)
    for leaf, where in zip(leaves, places, strict=True):
        _refuse_tiled(leaf, where, origin)
    values = [_value(leaf) for leaf in leaves]
    return example_by_example(func, values, spec, copies, places, name, origin.label, origin.compared)


def _place(leaf: Any, origin: Any) -> Layout | None:
    """The layout of an operation's argument; None if it has no batch axis."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, PerExample) or not leaf.numel():
        return None
    layout: Layout = origin.find(leaf)
    return None if layout.order is Order.SHARED else layout


def _refuse_tiled(leaf: Any, place: Layout | None, origin: Any) -> None:
    if place is not None and place.order is Order.TILED:
        raise UserError(
            f"{origin.label} is combined with a tensor of shape {tuple(leaf.shape)} that has one row of every example "
            "after the other, which is not supported: put each example's rows together, or freeze it."
        )


def _of_the_batch(copies: PerExample) -> Tensor:
    """If the plan says that copies (B, *shape) were expanded to the batch, turn them into a plain tensor of the batch,
    in which each example's rows come from its own copy."""
    place = _place(copies.like, copies.origin)
    if place is None:
        return copies
    _refuse_tiled(copies.like, place, copies.origin)
    if copies.origin.traces:
        return copies.like
    rows = copies.rows
    own = rows.unflatten(place.axis + 1, (len(rows), place.rows_per_example)).diagonal(dim1=0, dim2=place.axis + 1)
    return own.movedim(-1, place.axis).flatten(place.axis, place.axis + 1)


def _align(copies: PerExample, rank: int, place: Layout, name: str) -> Tensor:
    """Copies (B, *shape) as a plain tensor of `rank` axes with the layout `place`; raises a `UserError` if they have
    several rows on the batch axis."""
    rows, axis = copies.rows, place.axis
    rows = rows.reshape(len(rows), *(1,) * (rank - rows.dim() + 1), *rows.shape[1:])
    if rows.shape[axis + 1] != 1:
        raise UserError(
            f"{copies.origin.label} has {rows.shape[axis + 1]} rows where a tensor in {name} has its batch axis, so it "
            "is unknown which example each belongs to: freeze it, or give it one row."
        )
    rows = rows.movedim(0, axis + 1).squeeze(axis) if axis else rows.squeeze(1)
    if place.order is Order.TILED:
        return torch.cat([rows] * place.rows_per_example, axis)
    return rows if place.rows_per_example == 1 else rows.repeat_interleave(place.rows_per_example, axis)


def _value(leaf: Any) -> Any:
    """A PerExample's value, (*shape), detached; any other object unchanged."""
    return leaf.like.detach() if isinstance(leaf, PerExample) else leaf


_DESCRIBES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "get_device", "__len__", "__hash__", "storage_offset", "is_signed", "is_inference"),
}
"""Methods that need only its shape or dtype, as do most attributes."""

_VALUES = {
    *("get data", "get grad", "detach", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy"),
    *("isnan", "isinf", "isfinite", "equal", "allclose", "__format__", "data_ptr", "untyped_storage", "argmax"),
}
"""Operations through which no gradient flows."""

_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "pow")
_BROADCASTS = {
    *_ARITHMETIC,
    *(f"{name}_" for name in _ARITHMETIC),
    *(f"__{sign}{name}__" for name in _ARITHMETIC for sign in ("", "r", "i")),
    *("rsub", "true_divide", "multiply", "subtract", "divide", "maximum", "minimum", "where", "lerp", "addcmul"),
    "scaled_dot_product_attention",
}
"""Operations that broadcast from the last axis on, so that copies can be aligned with the batch."""

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}
"""Matrix products, which broadcast all axes but the last two."""

_REPEATS = {"expand", "broadcast_to", "repeat", "tile", "repeat_interleave", "stack", "cat", "concat", "concatenate"}
"""Operations that can expand a parameter to one row per example."""

_COMPUTED = {"get data", "get grad", "get real", "get imag", "get T", "get mT", "get H", "get mH"}
"""Attributes that are tensors."""

_TRANSPOSES = {"get T", "get mT", "get H", "get mH", "t", "adjoint", "transpose", "swapaxes", "swapdims"}
"""Operations that transpose a real matrix, with or without axes as arguments."""


def _view_of_parameter(name: str, args: Any, kwargs: Any) -> Any:
    """The result of an operation that only makes a view of a parameter (transpose, expand, some rows); else None."""
    if not args or not isinstance(args[0], PerExample) or (kwargs and name != "split"):
        return None
    seen, rest = args[0], (*args[1:], *kwargs.values())  # torch names the axis of `split`
    if name == "repeat":
        times = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
        counts = list(zip(times, (*(1,) * (len(times) - seen.dim()), *seen.shape), strict=True))
        if all(1 in pair for pair in counts):  # then expanding does the same without memory
            made = seen.expand([count * size for count, size in counts])
            return made if isinstance(made, PerExample) else made.contiguous()  # torch's repeat returns no view
    if name == "expand_as" and len(rest) == 1:  # only the shape of the other tensor matters
        return seen.expand(rest[0].shape)
    if name in ("to", "type_as") and len(rest) == 1 and isinstance(rest[0], Tensor):
        return seen.to(rest[0].device, rest[0].dtype)
    if seen.is_matrix and name in _TRANSPOSES and (not rest or {axis % 2 for axis in rest} == {0, 1}):
        turned = not seen.transposed
        return PerExample(lambda: seen.rows.mT, seen.like.mT, seen.origin, True, turned, seen.part)
    if seen.source and seen.dim() and not seen.transposed and seen.part is None:
        if name == "__getitem__" and isinstance(rest[0], slice) and rest[0].step in (None, 1):
            return _rows_of(seen, rest[0])
        if name in ("chunk", "split") and rest[1:] in ((), (0,)):
            ends = list(accumulate(len(piece) for piece in getattr(seen.like, name)(*rest)))
            return tuple(_rows_of(seen, slice(start, end)) for start, end in pairwise([0, *ends]))
    return None


def _rows_of(whole: PerExample, rows: slice) -> PerExample:
    """Some rows of a parameter."""
    start, stop, _ = rows.indices(len(whole))
    if (start, stop) == (0, len(whole)):
        return whole
    part = slice(start, stop)
    return PerExample(lambda: whole.rows[:, part], whole.like[part], whole.origin, True, part=part)
