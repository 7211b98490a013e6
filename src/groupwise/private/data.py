"""Checks the data that is passed to `make_private`, and how to read it."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from groupwise.clipping.unchanged import Generators
from groupwise.errors import UserError, warn
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.training.microbatches import examples_to_trace
from groupwise.training.plain import PLAIN


def length_of(data: Any) -> int:
    """The number of examples, N.

    Raises:
        UserError: a table, columns of examples, or anything without a length and numbered examples.
    """
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"data is a {type(data).__name__} without a length or numbered examples; Poisson sampling needs both: give "
            "a dataset with __len__ and __getitem__."
        )
    few = data if isinstance(data, tuple | list) and len(data) < 5 else ()
    rows = {each.shape[0] for each in few if getattr(each, "ndim", 0)}  # tensors, arrays, tables of pandas
    columns = len(rows) == 1 and max(rows) > len(data)
    if columns or hasattr(type(data), "iloc") or (isinstance(data, Mapping) and 0 not in data):  # iloc: of pandas
        raise UserError(
            f"data is a {type(data).__name__} of columns, not of examples: give torch.utils.data.TensorDataset(x, y) "
            "of tensors whose rows are the examples (x in float32), or a list of examples."
        )
    return len(data)


def unpack_loader(data: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset, and how to read it: as given, else as the DataLoader does.

    Args:
        data: a dataset, or a DataLoader, whose sampler and batch size are not used.
        given: arguments of a DataLoader; None for those that were not given.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if not isinstance(data, DataLoader):
        return data, asked
    warn(
        "data is a DataLoader: its dataset, collate function and workers are used; its sampler and batch size are "
        "not, as every step draws each example with probability batch_size / N (a weighted sampler balances nothing)."
    )
    return data.dataset, {name: getattr(data, name) for name in given} | asked


SAMPLE = 12
"""How many examples are read, to choose those that are traced."""


def choose_examples(data: Any, size: int) -> list[int]:
    """Indices of examples for the trace, spread over the dataset, the largest first."""
    some = dict.fromkeys(np.linspace(0, size - 1, SAMPLE).round().astype(int).tolist())
    sizes = {row: sum(_numel(leaf) for leaf in tree_leaves(data[row])) for row in some}
    return examples_to_trace(sorted(some, key=lambda row: -sizes[row]))


def check_items(read: Callable[[list[int]], list[Any]], rows: list[int]) -> None:
    """Check that reading several examples (by their indices) does not mix them; raise a `UserError` that names one.

    Items without random numbers must be the same in a batch and alone. Others must stay the same if the last one of the
    batch is replaced, with the same seed of the default generators.
    """

    generators = Generators(())

    def digests(rows: list[int]) -> list[str]:
        with generators.kept():
            generators.seed(0)
            return list(map(digest, read(rows)))

    alone, alone_again = ([digest(read([row])[0]) for row in rows] for _ in range(2))
    batch, batch_again = digests(rows), digests(rows)
    replaced = [*digests([*rows[:-1], rows[0]])[:-1], batch[-1]]
    for row, one, two, three, four, five in zip(rows, alone, alone_again, batch, batch_again, replaced, strict=True):
        if one == two != three or three == four != five:
            raise UserError(
                f"The data give another example {row} in one batch than in another, so reading mixes the examples of "
                "a batch: transform each item by itself, and return tensors of its own."
            )


def _numel(leaf: Any) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return int(np.prod(leaf.shape))
    return len(leaf) if isinstance(leaf, str | bytes) else 1


def digest(item: Any) -> str:
    """SHA-256 of an example: tensors and arrays by dtype, shape and bytes, numbers and strings by value.

    Of any other value only the type is used.
    """
    leaves, spec = tree_flatten(item)
    found = sha256(repr(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            whole = leaf.detach().cpu().contiguous()
            found.update(f"{whole.dtype} {tuple(whole.shape)}\n".encode())
            found.update(whole.flatten().view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            found.update(f"{leaf.dtype} {leaf.shape}\n".encode() + leaf.tobytes())
        else:
            found.update(f"{leaf!r}\n".encode() if isinstance(leaf, PLAIN) else f"{type(leaf).__name__}\n".encode())
    return found.hexdigest()


def fingerprint(data: Any, noise: NoiseSource) -> str | None:
    """A digest of the first, middle and last example, to compare the data of several processes.

    The default generators are seeded from the key meanwhile. None if an example differs each time that it is read.
    """
    digests = set()
    for _ in range(2):
        with secret_randomness(noise.child("print"), 0):
            digests.add(digest([data[row] for row in (0, len(data) // 2, len(data) - 1)]))
    return digests.pop() if len(digests) == 1 else None
