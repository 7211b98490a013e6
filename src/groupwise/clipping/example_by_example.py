"""Applies an operation by vmap to each example's rows and its copy of a parameter, or refuses the operation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from groupwise.clipping.clip_plan import Layout
from groupwise.errors import UserError


def example_by_example(
    func: Any,
    leaves: list[Any],
    spec: Any,
    copies: Mapping[int, Tensor],
    places: Sequence[Layout | None],
    name: str,
    label: str,
    seen: set[tuple[object, ...]],
) -> Any:
    """Apply an operation to each example's rows and its copies; the result has the same layout as these rows.

    Args:
        leaves, spec: its arguments, flattened; the parameter's value where there are copies.
        copies: index of a leaf -> one copy per example, (B, ...).
        places: the layouts of the other leaves; None: the same for all examples.
        name, label: of the operation, and of the parameter or layer, for messages.
        seen: operations whose result was compared with that on the whole batch; a new one is compared, and added.

    Raises:
        UserError: the operation cannot be split by example.
    """
    place = max((p for p in places if p is not None), key=lambda p: p.rows_per_example)
    parts = dict(copies)
    for i, p in enumerate(places):
        if p is not None:
            parts[i] = leaves[i].unflatten(p.axis, (-1, p.rows_per_example)).movedim(p.axis, 0)
    key = (label, name, *(part.dim() for part in parts.values()))
    compares = key not in seen and all(bool((rows == rows[:1]).all()) for rows in copies.values())  # not after dropout
    seen.add(key)
    before = [leaf.detach().clone() if compares and isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def joined(made: Any) -> Any:
        if not isinstance(made, Tensor):
            return made
        if made.dim() > place.axis + 1 and made.shape[place.axis + 1] == place.rows_per_example:
            return made.movedim(0, place.axis).flatten(place.axis, place.axis + 1)
        raise UserError(
            f"{label} went into {name}, in whose result of shape {tuple(made.shape[1:])} an example has no rows of its "
            "own: put the batch first in the result (einsum('bi,eio->beo', ...)), or freeze the parameter."
        )

    made = tree_map(joined, for_examples(func, leaves, spec, parts, name, label))
    if compares:
        _refuse_other_values([*tree_leaves(made), leaves[0]], func, before, spec, name, label)
    return made


def _refuse_other_values(made: list[Any], func: Any, before: Sequence[Any], spec: Any, name: str, label: str) -> None:
    """Raise a `UserError` if an operation's result on the whole batch differs from that on single examples: it mixes
    examples, or puts a shared tensor into some rows of the batch."""
    found = []
    with torch.no_grad(), torch.random.fork_rng():
        for _ in range(2):
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in before]
            args, kwargs = tree_unflatten(own, spec)
            found.append([*tree_leaves(func(*args, **kwargs)), own[0]])
    for one, whole, again in zip(made, *found, strict=True):
        if isinstance(one, Tensor) and not _alike(one, whole) and _alike(whole, again):  # no random numbers
            raise UserError(
                f"{label} goes into {name}, whose result on a batch differs from that on its examples one by one: it "
                "mixes rows of different examples, or puts a shared tensor into some of them. Compute it for every "
                "example and choose by torch.where or a mask (experts see every token), or freeze it."
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    if one.shape != other.shape:
        return False
    one, other = one.detach().double().nan_to_num(), other.double().nan_to_num()
    return bool(((one - other).abs() <= 0.01 * torch.maximum(one.abs(), other.abs()).amax()).all())


def for_examples(func: Any, leaves: list[Any], spec: Any, parts: Mapping[int, Tensor], name: str, label: str) -> Any:
    """Apply an operation by vmap over examples, with parts (B, ...) for some leaves; it may return other objects too.
    Raises a `UserError` if vmap does not support it."""
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
                f"{label} is written in place (by {name}) into a tensor: make the tensor by an out-of-place operation "
                "(index_put, scatter, where, stack), or freeze it."
            ) from error
        raise UserError(
            f"{label} is used by {name}, which does not work with a copy of it for each example "
            f"({str(error).splitlines()[0]}): use matmul or einsum (in place of torch.vmap, say), register a rule for "
            "the layer that holds it, or freeze it."
        ) from error
    shown, shown_spec = nest
    return tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in shown], shown_spec)


def _for_all(one: Callable[..., tuple[Tensor, ...]], parts: list[Tensor]) -> Iterable[Tensor]:
    """Apply a function of one example's parts to all examples, by vmap.

    Without a batching rule it is called in a loop over the examples. vmap would loop too, but by `select`, whose
    gradients are as large as the whole batch, so that its time grows with the square of the batch size.
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
