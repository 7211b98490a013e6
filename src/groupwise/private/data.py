"""Checks the data that are passed to `make_private`, and how examples are read."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from groupwise.clipping.trace import TRACED
from groupwise.clipping.unchanged import Generators
from groupwise.errors import UserError, warn
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.training.microbatches import examples_to_trace
from groupwise.training.plain import PLAIN


def length_of(data: Any) -> int:
    """The number of examples, N; raises `UserError` for data without it, of columns, or with repeated examples."""
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
    if isinstance(data, Subset):
        repeats = len({*map(int, data.indices)}) < len(data)
    else:
        repeats = isinstance(data, ConcatDataset) and len({*map(id, data.datasets)}) < len(data.datasets)
    if repeats:
        raise UserError(
            f"The {type(data).__name__} has the same example several times, but epsilon is for one row: give each "
            "example once, and multiply its loss by a weight."
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
"""The number of examples that are read to choose those for the trace, besides the successors of the chosen ones."""


def choose_examples(data: Any, size: int) -> list[int]:
    """Choose six examples for the trace among some that are spread over the dataset; returns their indices.

    The largest comes first, then the smallest, then those with the rarest values, and then those of middle sizes. If no
    two of them share a label, query or user, two that do are added, as a loss may mix examples only if such a pair, a
    rare label or a missing value is in the batch.
    """
    some = dict.fromkeys(np.linspace(0, size - 1, READ).round().astype(int).tolist())
    items = {row: list(_leaves(data[row])) for row in some}
    ordered = sorted(items, key=lambda row: -sum(map(_numel, items[row])))
    rarity = dict.fromkeys(items, len(items))
    features = {row: list(map(_feature, leaves)) for row, leaves in items.items()}
    for column in _columns(features):
        counts = Counter(column.values())
        if len(counts) <= len(items) / 2:  # else nearly every value is another, as in a regression
            rarity = {row: min(rarity[row], counts[value]) for row, value in column.items()}
    rarest = sorted((row for row in ordered if rarity[row] < len(items)), key=rarity.__getitem__)
    chosen = list(dict.fromkeys([*ordered[:1], *ordered[-1:], *rarest[:2], *examples_to_trace(ordered)]))[:TRACED]
    near = {row + 1 for row in chosen if row + 1 < size} - items.keys()  # the data may be sorted by query
    return _with_pairs(chosen, features | {row: list(map(_feature, _leaves(data[row]))) for row in sorted(near)})


def _with_pairs(chosen: list[int], features: Mapping[int, list[str]]) -> list[int]:
    """Add up to two pairs of examples, second to fifth, that share values of which no two of the chosen have the same.

    A pair differs in as many other values as possible: two documents of one query, but of different relevance.
    """
    columns = _columns(features)
    for _ in range(2):
        distinct = [column for column in columns if len({column[row] for row in chosen}) == len(chosen)]
        shared = {(i, j): sum(each[i] == each[j] for each in distinct) for i, j in combinations(features, 2)}
        other = {(i, j): sum(each[i] != each[j] for each in columns) for i, j in shared if shared[i, j]}
        if not other:
            break
        best = max(other, key=lambda pair: (shared[pair], other[pair]))
        chosen = list(dict.fromkeys([chosen[0], *best, *chosen[1:]]))
    return chosen


def _columns(features: Mapping[int, list[str]]) -> list[dict[int, str]]:
    """The features of each part of the examples, by row."""
    return [dict(zip(features, values, strict=True)) for values in zip_longest(*features.values())]


def _leaves(item: Any, depth: int = 3) -> Iterator[Any]:
    """The parts of an example (tensors, arrays, numbers, strings, objects), and the parts of objects such as graphs."""
    for leaf in tree_leaves(item, is_leaf=_is_array):
        yield np.asarray(leaf) if isinstance(leaf, list) else leaf
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor):
            yield from _leaves(vars(leaf), depth - 1)


def _is_array(value: Any) -> bool:
    """Whether a list has many numbers, such as token ids, and so is one part and not many."""
    return isinstance(value, list) and len(value) > 16 and all(isinstance(number, int | float) for number in value)


def _feature(leaf: Any) -> str:
    """What may be rare about a part of an example, or shared: a single value, or whether any is NaN or not 0."""
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
    """The SHA-256 of an example: of tensors, arrays, numbers, strings, and the types and attributes of objects."""
    found = sha256(repr(tree_structure(item)).encode())
    for leaf in _leaves(item):
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
