"""Does an operation that has no other way with each example's own copy of a parameter, by vmap, or refuses it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from groupwise.clipping.layouts import Layout
from groupwise.errors import UserError

_WRITES = {
    *("index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce"),
    *("select_scatter", "slice_scatter", "index_put", "__setitem__", "masked_scatter", "put", "diagonal_scatter"),
}
"""Operations that put something into chosen places of their first argument."""

_JOINS = {"cat", "concat", "concatenate", "vstack", "row_stack"}

_BESIDE = {
    *("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "slice_scatter"),
    *("index_add", "index_copy", "index_reduce", "hstack", "dstack", "column_stack"),
    *("cross", "linalg_cross", "linalg_vecdot", "cosine_similarity", "pairwise_distance", "cdist", "grid_sample"),
}
"""Operations that put row i of a tensor beside row i of others with as many axes; the rest take tables and weights."""


def refuse_mixtures(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[Layout | None], label: str
) -> None:
    """Refuse what mixes examples, or puts a parameter, or what is the same for all, into rows of the batch.

    Each example's own copy would land in its own row at whatever number was meant of the whole batch's rows.

    Args:
        name: the operation's.
        args: its arguments.
        kwargs: those with a name.
        places: where its tensors hold the batch; None: nowhere.
        label: of the parameter, for the message.

    Raises:
        UserError: naming the parameter or layer, and the operation.
    """
    mixes = (name == "batch_norm" and bool(args[5] if len(args) > 5 else kwargs.get("training"))) or (
        name == "einsum" and isinstance(args[0], str) and _mixes(args[0], places)
    )
    if mixes:
        raise UserError(
            f"{label} goes into {name} with rows of different examples: compute each example by itself, or freeze it."
        )
    name = name if name.startswith("__") else name.rstrip("_")
    if name in _WRITES:
        place = places[0]  # of what is written into
        if place is None and name in _BESIDE:
            leaves = tree_leaves((args, kwargs))
            beside = zip(leaves, places, strict=True)
            place = next((p for leaf, p in beside if p is not None and leaf.dim() == leaves[0].dim()), None)
    elif name in _JOINS:
        place = next(p for p in places if p is not None)
    else:
        return
    if place is not None and not _along(name, args, kwargs, place.axis):
        return
    raise UserError(
        f"{label} is put into rows of the batch (by {name}), so it cannot be told whose they are: compute it for every "
        "example and choose by torch.where or a mask (experts see every token), or freeze it."
    )


def _mixes(equation: str, places: Sequence[Layout | None]) -> bool:
    """Whether the operands of an einsum have their examples under different letters; places[0] is the equation's."""
    operands = equation.partition("->")[0].replace(" ", "").split(",")
    held = zip(operands, places[1:], strict=False)
    letters = {letters[p.axis] for letters, p in held if p is not None and "." not in letters[: p.axis + 1]}
    return len(letters) > 1


def _along(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], axis: int) -> bool:
    """Whether the places are chosen along that axis of the first argument."""
    if name in ("masked_scatter", "put", "diagonal_scatter"):
        return True
    if name in ("index_put", "__setitem__"):
        key = args[1] if len(args) > 1 else kwargs["indices"]
        keys = [slice(None) if k is None else k for k in key] if name == "index_put" else key
        return not _is_whole(tuple(keys) if isinstance(keys, (tuple, list)) else (keys,), args[0].shape, axis)
    if name in ("vstack", "row_stack"):
        return axis == 0
    where = 2 if name in ("select_scatter", "slice_scatter", "take_along_dim") else 1
    dim = args[where] if len(args) > where else kwargs.get("dim", kwargs.get("axis", 0))
    rank = next(leaf.dim() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return dim is None or bool(dim % rank == axis)


def _is_whole(keys: Sequence[Any], shape: Sequence[int], axis: int) -> bool:
    """Whether an index takes all of an axis of a tensor."""
    at, taken = 0, [_axes_of(key) for key in keys]
    for i, key in enumerate(keys):
        if key is Ellipsis:
            at = len(shape) - sum(taken[i + 1 :])
            if axis < at:
                return True
        elif at <= axis < at + taken[i]:
            return isinstance(key, slice) and key.indices(shape[axis]) == (0, shape[axis], 1)
        at += taken[i]
    return True


def _axes_of(key: Any) -> int:
    """How many axes an index takes."""
    if key is None or key is Ellipsis:
        return 0
    return int(key.dim()) if isinstance(key, Tensor) and key.dtype == torch.bool else 1


def own_rows(rows: Tensor, axis: int, each: int, name: str, label: str) -> Tensor:
    """Copies (B, *shape) that have B·each rows on an axis of theirs, each with its own example's rows there alone.

    Raises:
        UserError: they have another number of rows there.
    """
    batch, size = len(rows), rows.shape[axis + 1]
    if size != batch * each:
        raise UserError(
            f"{label} has {size} rows where it meets (in {name}) a batch of {batch} examples with {each} rows each, "
            "so it cannot be told whose they are: freeze it, or give it one row."
        )
    return rows.unflatten(axis + 1, (batch, each)).diagonal(dim1=0, dim2=axis + 1).movedim(-1, 0)


def _row_axis(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaf: Tensor,
    at: int,
    leaves: Sequence[Any],
    places: Sequence[Layout | None],
    place: Layout,
) -> int | None:
    """The axis on which an operation puts a leaf's rows beside those of the batch; None: it takes all of them."""
    if name == "einsum" and isinstance(args[0], str) and "." not in args[0]:
        letters = ["", *args[0].partition("->")[0].replace(" ", "").split(",")]
        axis = letters[at].find(letters[places.index(place)][place.axis])
        return None if axis < 0 else axis
    name = name.rstrip("_")
    alike = any(p == place and other.dim() == leaf.dim() for other, p in zip(leaves, places, strict=True) if p)
    if name not in _BESIDE or not alike or (name == "cdist" and place.axis > leaf.dim() - 3):
        return None
    if name in ("gather", "take_along_dim") and _along(name, args, kwargs, place.axis):
        return None
    return place.axis


def example_by_example(
    func: Any,
    leaves: list[Any],
    spec: Any,
    copies: Mapping[int, Tensor],
    places: Sequence[Layout | None],
    place: Layout,
    name: str,
    label: str,
) -> Any:
    """An operation on each example's rows with its copies; the result has the examples where `place` says.

    Args:
        func: the operation.
        leaves: its arguments, flat.
        spec: how they were nested.
        copies: each example's own, (B, ...), of some of the leaves.
        places: where the others hold the batch; None: they are the same for all examples.
        place: where the result has it.
        name: the operation's.
        label: the parameter's or layer's, for messages.

    Raises:
        UserError: the operation cannot be done so.
    """
    args, kwargs = tree_unflatten(leaves, spec)
    parts, cure = dict(copies), ""
    for i, rows in copies.items():
        axis = _row_axis(name, args, kwargs, leaves[i], i, leaves, places, place)
        if axis is not None and rows.shape[axis + 1] != 1:
            parts[i] = own_rows(rows, axis, place.each, name, label)
        elif len(rows) * place.each in rows.shape[1:]:
            cure = "give it as it is, not expanded to the batch (every example has its own), or "
    for i, p in enumerate(places):
        if p is not None:
            parts[i] = leaves[i].unflatten(p.axis, (-1, p.each)).movedim(p.axis, 0)
    shapes = _whole_shapes(func, leaves, spec)

    def joined(made: Any) -> Any:
        if not isinstance(made, Tensor):
            return made
        if made.dim() > place.axis + 1 and made.shape[place.axis + 1] == place.each:
            whole = made.movedim(0, place.axis).flatten(place.axis, place.axis + 1)
            if shapes is None or next(shapes) == whole.shape:
                return whole
        raise UserError(
            f"{label} went into {name}, whose result of shape {tuple(made.shape[1:])} an example "
            f"keeps no rows apart: {cure}wrap the computation in a layer type with a rule, or freeze the parameter."
        )

    return tree_map(joined, for_examples(func, leaves, spec, parts, name, label, cure))


def _whole_shapes(func: Any, leaves: Sequence[Any], spec: Any) -> Iterator[torch.Size] | None:
    """The shapes of what an operation makes of its whole arguments; None where their values say."""
    kinds = [torch.float32 if isinstance(leaf, Tensor) and leaf.is_floating_point() else None for leaf in leaves]
    whole = [
        torch.empty(leaf.shape, dtype=kind or leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    args, kwargs = tree_unflatten(whole, spec)
    try:
        with torch.no_grad():
            made = func(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError):  # no shapes alone, or a mistake that the whole shows
        return None
    return iter([leaf.shape for leaf in tree_leaves(made) if isinstance(leaf, Tensor)])


def for_examples(
    func: Any, leaves: list[Any], spec: Any, parts: Mapping[int, Tensor], name: str, label: str, cure: str = ""
) -> Any:
    """An operation by vmap over examples, with these leaves' parts (B, ...); it may return more than tensors.

    `cure` goes before the others that a refusal names.

    Raises:
        UserError: it cannot be done so.
    """
    nest: list[Any] = []

    def one(*own: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for i, part in zip(parts, own, strict=True):
            filled[i] = part
        args, kwargs = tree_unflatten(filled, spec)
        made, made_spec = tree_flatten(func(*args, **kwargs))
        nest[:] = [made, made_spec]
        return tuple(leaf for leaf in made if isinstance(leaf, Tensor))

    try:
        made = iter(_for_all(one, list(parts.values())))
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if name == "__setitem__" or name.endswith("_"):
            raise UserError(
                f"{label} is written in place (by {name}) into a tensor that all examples share: make "
                "the tensor by an operation that is not in place (index_put, scatter, where, stack), or freeze it."
            ) from error
        raise UserError(
            f"{label} is used by {name}, which cannot be done with a copy of it for each example "
            f"({str(error).splitlines()[0]}): {cure}freeze it, or register a rule for the layer that holds it."
        ) from error
    shown, shown_spec = nest
    return tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in shown], shown_spec)


def _for_all(one: Callable[..., tuple[Tensor, ...]], parts: list[Tensor]) -> Iterable[Tensor]:
    """A function of one example's parts for all examples, by vmap.

    What has no batching rule is called for one example after the other: vmap would do so too, but by `select`, whose
    gradients are as large as all examples' together, so that its time grows with their square.
    """
    vmap: Any = torch._C._functorch
    allowed = vmap._is_vmap_fallback_enabled()
    vmap._set_vmap_fallback_enabled(False)
    try:
        return torch.vmap(one, randomness="different")(*parts)
    except RuntimeError as error:
        if "vmap fallback" not in str(error):
            raise
    finally:
        vmap._set_vmap_fallback_enabled(allowed)
    each = [one(*own) for own in zip(*(part.unbind(0) for part in parts), strict=True)]
    return [torch.stack(made) for made in zip(*each, strict=True)]
