"""Checks the data that are passed to `make_private`, and how examples are read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from groupwise.clipping.trace import TRACED
from groupwise.clipping.unchanged import Generators
from groupwise.errors import UserError, warn
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.training.microbatches import examples_to_trace
from groupwise.training.plain import PLAIN


def length_of(data: Any) -> int:
    """The number of examples, N; raises `UserError` for data without it, or of columns, such as a pandas table."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"data is a {type(data).__name__} without __len__ or __getitem__, which Poisson sampling needs: give a "
            "dataset that has both."
        )
    few = data if isinstance(data, tuple | list) and len(data) < 5 else ()
    rows = {each.shape[0] for each in few if getattr(each, "ndim", 0)}  # tensors, arrays or pandas tables
    columns = len(rows) == 1 and max(rows) > len(data)
    if columns or hasattr(type(data), "iloc") or (isinstance(data, Mapping) and 0 not in data):  # pandas has iloc
        raise UserError(
            f"data is a {type(data).__name__} of columns, not of examples: give torch.utils.data.TensorDataset(x, y) "
            "with tensors of one row per example (x in float32), a list of examples, or one split of a DatasetDict."
        )
    return len(data)


def unpack_loader(data: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
    """The dataset, and the arguments of a DataLoader for reading it: ``given`` if not None, else the DataLoader's."""
    asked = {name: value for name, value in given.items() if value is not None}
    if not isinstance(data, DataLoader):
        return data, asked
    warn(
        "data is a DataLoader: its dataset, collate function and workers are used (no worker_init_fn). Its sampler "
        "and batch size are not, as every step draws each example with probability batch_size / N (so a weighted "
        "sampler has no effect)."
    )
    return data.dataset, {name: getattr(data, name) for name in given} | asked


READ = 100
"""The number of examples that are read to choose those for the trace."""


def choose_examples(data: Any, size: int) -> list[int]:
    """Choose six examples for the trace among some that are spread over the dataset; returns their indices.

    The largest comes first, then the smallest, then those with the rarest values, and then those of middle sizes. A
    loss may mix examples only if a rare label or a missing value is in the batch.
    """
    some = dict.fromkeys(np.linspace(0, size - 1, READ).round().astype(int).tolist())
    items = {row: tree_leaves(data[row]) for row in some}
    ordered = sorted(items, key=lambda row: -sum(map(_numel, items[row])))
    rarity = dict.fromkeys(items, len(items))
    for column in zip_longest(*(map(_feature, items[row]) for row in items)):
        counts = Counter(column)
        if len(counts) <= len(items) / 2:  # else nearly every value is another, as in a regression
            rarity = {row: min(rarity[row], counts[value]) for row, value in zip(items, column, strict=True)}
    rarest = sorted((row for row in ordered if rarity[row] < len(items)), key=rarity.__getitem__)
    return list(dict.fromkeys([*ordered[:1], *ordered[-1:], *rarest[:2], *examples_to_trace(ordered)]))[:TRACED]


def _feature(leaf: Any) -> str:
    """What may be rare about a part of an example: a single value, or whether any of several is NaN or not 0."""
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        leaf = torch.as_tensor(leaf)
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__
    return repr(leaf.item()) if leaf.numel() == 1 else f"{bool(leaf.isnan().any())} {bool(leaf.any())}"


def read_items(data: Any, rows: Sequence[int]) -> list[Any]:
    """Read examples: together if the dataset has ``__getitems__``, otherwise one after the other."""
    if hasattr(data, "__getitems__"):
        return list(data.__getitems__(list(rows)))
    return [data[row] for row in rows]


def check_items(data: Any, rows: list[int]) -> None:
    """Check that reading several examples does not mix them.

    An example without random augmentation must be the same in a batch and alone. Other examples must stay the same if
    the last one of the batch is replaced, with the same seed of the default generators. Otherwise raises `UserError`.
    """
    generators = Generators(())

    def digests(rows: list[int]) -> list[str]:
        with generators.kept():
            generators.seed(0)
            return list(map(digest, read_items(data, rows)))

    alone, alone_again = ([digest(read_items(data, [row])[0]) for row in rows] for _ in range(2))
    batch, batch_again = digests(rows), digests(rows)
    replaced = [*digests([*rows[:-1], rows[0]])[:-1], batch[-1]]
    for row, one, two, three, four, five in zip(rows, alone, alone_again, batch, batch_again, replaced, strict=True):
        if one == two != three or three == four != five:
            raise UserError(
                f"Example {row} of the data differs between batches, so reading mixes the examples of a batch: "
                "transform each example by itself, and return new tensors for it."
            )


def _numel(leaf: Any) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return int(np.prod(leaf.shape))
    return len(leaf) if isinstance(leaf, str | bytes) else 1


def digest(item: Any) -> str:
    """The SHA-256 of an example: of tensors, arrays, numbers and strings, and of the types of other objects."""
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
    """A digest of the first, middle and last example, read with randomness from the key; None if they still differ."""
    digests = set()
    for _ in range(2):
        with secret_randomness(noise.child("print"), 0):
            digests.add(digest([data[row] for row in (0, len(data) // 2, len(data) - 1)]))
    return digests.pop() if len(digests) == 1 else None
