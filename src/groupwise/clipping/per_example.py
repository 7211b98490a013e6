"""Gives every example a copy of its own of a parameter, behind the parameter's own shape.

Where a module computes with a parameter by itself (`x * self.scale`, `torch.cat([self.token, x], 1)`), no layer stands
in between that could keep the examples' gradients apart. There the engine puts a `PerExample` in the parameter's place:
to the module it has the parameter's shape, but it holds B equal copies, one an example (expanded, so that they take no
memory). Operations on it alone stay B-fold; as soon as it meets a tensor that holds the batch, example i gets the i-th
copy. The gradient of the copies, (B, *shape), then is the per-example gradient, for any operation.

The same holds for what a layer makes of an input without a batch axis, such as `wpe(torch.arange(T))`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from groupwise.clipping.example_by_example import example_by_example, for_examples, own_rows, refuse_mixtures
from groupwise.clipping.layouts import SHARED, Layout
from groupwise.errors import UserError


class Origin(Protocol):
    """Where a `PerExample` comes from, and what it asks about the forward pass that it is in."""

    label: str
    """The parameter's or layer's name, for messages."""

    @property
    def traces(self) -> bool:
        """Whether the forward pass is one of the trace, in which nothing is clipped and no layout may be known yet."""

    def layout_of(self, x: Tensor) -> Layout | None:
        """Where a plain tensor that meets the `PerExample` holds the batch; None for what all examples share."""


class Parameter(Origin, Protocol):
    """The origin of a `PerExample` that is a parameter, or its transpose."""

    def linear(self, x: Tensor, bias: "PerExample | None", transposed: bool, layout: Layout) -> Tensor | None:
        """x Wᵀ + b with this parameter as W (transposed: x W + b), by the rule of such layers; None: not possible."""

    def embedding(self, x: Tensor, padding_idx: int | None, layout: Layout) -> Tensor | None:
        """This parameter's rows, by the rule of such layers; None: not possible."""


class PerExample(torch.Tensor):
    """B tensors that look like one; see the module.

    Args:
        make: the copies, (B, *shape); asked for when they are first needed.
        like: a tensor with the shape, dtype and device that it shows.
        origin: where it comes from.
        source: it is a parameter itself rather than something computed from one.
        transposed: it is a matrix that is a parameter's transpose.
    """

    make: Callable[[], Tensor]
    origin: Origin
    like: Tensor
    source: bool
    transposed: bool

    @staticmethod
    def __new__(
        cls: type["PerExample"],
        make: Callable[[], Tensor],
        like: Tensor,
        origin: Origin,
        source: bool = False,
        transposed: bool = False,
    ) -> "PerExample":
        self: PerExample = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=_has_gradient(like)
        )  # so that a torch.autograd.Function, which no operation here takes apart, leads to it in the graph
        self.make, self.origin, self.like, self.source, self.transposed = make, origin, like, source, transposed
        if source:
            self._is_param = True  # isinstance(..., nn.Parameter) holds, as it does for what it stands for
        return self

    @property
    def rows(self) -> Tensor:
        """The copies, (B, *shape)."""
        return self.make()

    @classmethod
    def of_rows(cls, rows: Tensor, origin: Origin) -> "PerExample":
        """From computed copies (B, *shape)."""
        return cls(lambda: rows, rows[0].detach(), origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its name and shape."""
        return f"PerExample({self.origin.label}, {tuple(self.like.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing reaches it: `__torch_function__` takes every operation apart before."""
        raise UserError(f"A parameter that a module uses by itself went into {func}, which cannot be clipped.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with every example's own copy."""
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if not torch.is_grad_enabled() or name in _VALUES:
            args, kwargs = tree_map(_value, (args, kwargs))
            return func(*args, **kwargs)
        if (made := _turned(name, args, kwargs)) is not None:
            return made
        leaves, spec = tree_flatten((args, kwargs))
        mine = [leaf for leaf in leaves if isinstance(leaf, PerExample)]
        origin = mine[0].origin
        places = [
            origin.layout_of(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, PerExample) else None
            for leaf in leaves
        ]
        if not any(places):
            made = _by_rule(func, name, args, kwargs, lambda _: SHARED)
            return _alone(func, leaves, spec, origin) if made is None else made
        where = {id(leaf): place for leaf, place in zip(leaves, places, strict=True) if place is not None}
        if (made := _by_rule(func, name, args, kwargs, lambda x: where.get(id(x)))) is not None:
            return made
        if origin.traces:  # the batch may be elsewhere, and nothing is clipped
            args, kwargs = tree_map(_value, (args, kwargs))
            return func(*args, **kwargs)
        if len(mine[0].rows) == 1:  # whatever it meets belongs to the one example
            args, kwargs = tree_map(lambda leaf: leaf.rows[0] if isinstance(leaf, PerExample) else leaf, (args, kwargs))
            return func(*args, **kwargs)
        changes = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        if changes and isinstance(leaves[0], PerExample):  # it would stay what it was
            raise UserError(
                f"{origin.label}, or what was computed from it, is changed in place (by {name}) where it meets the "
                "examples: use operations that are not in place."
            )
        refuse_mixtures(name, args, kwargs, places, origin.label)
        place = max((p for p in places if p is not None), key=lambda p: p.each)
        if name in _BROADCASTS or (
            name in _PRODUCTS and all(leaf.dim() > 2 for leaf in leaves if isinstance(leaf, Tensor))
        ):
            args, kwargs = tree_unflatten(_aligned(leaves, places, name), spec)
            return func(*args, **kwargs)
        return example_by_example(func, leaves, spec, _copies(leaves), places, place, name, origin.label)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f"get {func.__self__.__name__}" if name in ("__get__", "__set__") else name


def _has_gradient(like: Tensor) -> bool:
    return like.is_floating_point() or like.is_complex()


def _value(leaf: Any) -> Any:
    """A PerExample's value, (shape), without gradient; anything else as it is."""
    return leaf.like.detach() if isinstance(leaf, PerExample) else leaf


_DESCRIBES = {
    *(f"get {name}" for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta")),
    *(f"get {name}" for name in ("requires_grad", "is_leaf", "grad_fn", "is_sparse", "is_quantized", "names")),
    *(f"get {name}" for name in ("is_nested", "is_mps", "is_xpu", "is_xla", "itemsize", "nbytes", "is_mkldnn")),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "get_device", "__len__", "__hash__", "storage_offset", "is_signed", "is_inference"),
}
"""Operations that ask for its shape or kind only."""

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
    *("masked_fill", "cat", "concat", "concatenate", "scaled_dot_product_attention", "logaddexp", "atan2", "copysign"),
    *("stack", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "xlogy"),
}
"""Operations that match axes from the last on (or, `cat`, have them all), so that copies can stand beside the batch."""

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}
"""Products of matrices, which match all axes but the last two where they have such."""

_TRANSPOSES = {"t", "get T", "get mT", "get H", "get mH", "adjoint", "transpose", "swapaxes", "swapdims"}
"""Operations that swap the axes of a matrix of real numbers; some get the axes, some not."""


def _alone(func: Any, leaves: list[Any], spec: Any, origin: Origin) -> Any:
    """An operation on parameters and constants: done with each example's copy."""
    copies = _copies(leaves)
    made = for_examples(func, leaves, spec, copies, _name_of(func), origin.label)

    return tree_map(lambda t: PerExample.of_rows(t, origin) if isinstance(t, Tensor) else t, made)


def _copies(leaves: list[Any]) -> dict[int, Tensor]:
    """Each example's own, (B, ...), of those leaves that have them."""
    return {i: leaf.rows for i, leaf in enumerate(leaves) if isinstance(leaf, PerExample)}


Where = Callable[[Tensor], Layout | None]
"""A tensor that meets a parameter -> where it holds the batch; None for one that was not asked about."""


def _turned(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Operations that only look at a parameter in another way, and ask nothing of what it meets."""
    if kwargs or not args or not isinstance(args[0], PerExample):
        return None
    if name == "repeat":
        return _expanded(args[0], args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:])
    if name == "view" and not isinstance(args[1], torch.dtype):
        return args[0].reshape(*args[1:])  # of what was expanded
    if name in ("expand_as", "view_as", "reshape_as") and len(args) == 2:  # what it is like tells its shape alone
        return getattr(args[0], name.removesuffix("_as"))(args[1].shape)  # type: ignore[no-any-return]
    if name in ("to", "type_as") and len(args) == 2 and isinstance(args[1], Tensor):
        return args[0].to(args[1].device, args[1].dtype)
    if name in _TRANSPOSES and _is_matrix(args[0]) and args[1:] in _BOTH_AXES:
        return _transposed(args[0])
    return None


def _by_rule(func: Any, name: str, args: Any, kwargs: Any, where: Where) -> Tensor | None:
    """What layers with a rule do as well is done by that rule: it needs no copy's gradient."""
    if func is F.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        if _is_plain(x) and _is_source(weight) and (bias is None or _is_source(bias)):
            layout = where(x)
            return None if layout is None else weight.origin.linear(x, bias, False, layout)
        return _product(x, weight, bias, where, turned=False)
    if func is F.embedding and _is_source(args[1]) and _is_plain(args[0]):
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = dict(zip(names, args, strict=False)) | kwargs
        if not (given.get("max_norm") or given.get("scale_grad_by_freq") or given.get("sparse")):
            layout = where(args[0])
            return None if layout is None else args[1].origin.embedding(args[0], given.get("padding_idx"), layout)
    if kwargs or not args:
        return None
    if name in ("matmul", "__matmul__") and len(args) == 2:
        left, right = args
        if _is_matrix(left) and isinstance(right, Tensor) and right.dim() > 2:  # the batch is none of the last two
            made = _product(right, left, None, where, turned=False, columns=True)
            return None if made is None else made.mT
        return _product(left, right, None, where, turned=True)
    if name == "mm" and len(args) == 2 and args[0].dim() == 2:
        return _product(args[0], args[1], None, where, turned=True)
    if name == "addmm" and len(args) == 3 and args[1].dim() == 2:
        return _product(args[1], args[2], args[0], where, turned=True)
    if func is F.bilinear and len(args) > 2 and isinstance(args[2], PerExample):  # it has no batching rule
        if torch.is_autocast_enabled(args[0].device.type):  # which lowers linear layers, and not this
            return None
        pairs = (args[0].unsqueeze(-1) * args[1].unsqueeze(-2)).flatten(-2)
        sums: Tensor = F.linear(pairs, args[2].flatten(1), *args[3:])
        return sums
    return None


_BOTH_AXES = ((), (0, 1), (1, 0), (-2, -1), (-1, -2), (0, -1), (-1, 0), (-2, 1), (1, -2))


def _product(x: Any, weight: Any, bias: Any, where: Where, turned: bool, columns: bool = False) -> Tensor | None:
    """x Wᵀ + b by the rule of linear layers, if W and b are parameters.

    Args:
        x: (B, ..., d) or, sequences first, (T, B, ..., d).
        weight: W (p, d); turned: its transpose.
        bias: (p,).
        where: tells where x holds the batch.
        turned: see weight.
        columns: x is (B, ..., d, n) instead.

    Returns:
        (B, ..., p), or (B, ..., n, p); None where copies must do.
    """
    if not _is_matrix(weight) or not _is_plain(x):
        return None
    if x.dim() < 2 or x.layout is not torch.strided or not x.numel() or not weight.numel():
        return None
    if bias is not None and not (_is_source(bias) and bias.shape == (weight.shape[1 if turned else 0],)):
        return None
    layout = where(x)
    if layout is None or layout.shared or layout.each > 1 or x.dim() < layout.axis + 2 + columns or layout.axis > 1:
        return None
    return weight.origin.linear(x.mT if columns else x, bias, turned != weight.transposed, layout)


def _expanded(copies: PerExample, times: Sequence[int]) -> Tensor | None:
    """What `repeat` makes of axes of one entry, without a gradient for each time; None where it has others."""
    shape = (*(1,) * (len(times) - copies.dim()), *copies.shape)
    if any(count != 1 and size != 1 for count, size in zip(times, shape, strict=True)):
        return None
    return copies.expand([count * size for count, size in zip(times, shape, strict=True)])


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, PerExample)


def _is_source(value: Any) -> bool:
    return isinstance(value, PerExample) and value.source


def _is_matrix(value: Any) -> bool:
    """Whether it is a parameter of two axes, or its transpose."""
    if not isinstance(value, PerExample) or value.dim() != 2:
        return False
    return (value.source or value.transposed) and not value.like.is_complex()


def _transposed(matrix: PerExample) -> PerExample:
    """A parameter's transpose, or the transpose's."""
    turned = matrix.transposed
    return PerExample(lambda: matrix.rows.mT, matrix.like.mT, matrix.origin, source=turned, transposed=not turned)


def _aligned(leaves: list[Any], places: list[Layout | None], name: str) -> list[Any]:
    """Copies with their examples on the batch axis of the tensors that they meet."""
    rank = max(leaf.dim() for leaf in leaves if isinstance(leaf, Tensor))
    place = next(p.moved(rank - leaf.dim()) for leaf, p in zip(leaves, places, strict=True) if p is not None)
    return [align(leaf, rank, place, name) if isinstance(leaf, PerExample) else leaf for leaf in leaves]


def align(copies: PerExample, rank: int, place: Layout, name: str) -> Tensor:
    """Copies (B, *shape) as a plain tensor of `rank` axes that has the examples where `place` says.

    Raises:
        UserError: the copies have another number of rows there.
    """
    rows, axis = copies.rows, place.axis
    batch = rows.shape[0]
    rows = rows.reshape(batch, *(1,) * (rank - rows.dim() + 1), *rows.shape[1:])
    size = rows.shape[axis + 1]
    if size == 1:
        rows = rows.movedim(0, axis + 1).squeeze(axis) if axis else rows.squeeze(1)
        return rows if place.each == 1 else rows.repeat_interleave(place.each, axis)
    own = own_rows(rows, axis, place.each, name, copies.origin.label)
    return own.movedim(0, axis).flatten(axis, axis + 1)
