"""Loads the microbatches that were drawn, with torch's DataLoader; what a dataset draws at random follows the key."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.privacy.accountants import is_whole
from groupwise.training.mechanism import Mechanism
from groupwise.training.ranks import Alone, Ranks

Place = tuple[int, int, Sequence[int]]
"""Of a microbatch: its step, where it begins in this process's share of the batch, and its examples."""

Order = Callable[[np.ndarray], np.ndarray]
"""The numbers of a batch's examples, (n,), to the same numbers in the order in which they share microbatches."""


def parts_of(
    mechanism: Mechanism, drawn: np.ndarray, size: int, order: Order | None
) -> list[tuple[int, np.ndarray, bool]]:
    """This process's microbatches of a batch: where each begins, its examples, and whether it is a filler.

    Each takes one or more. In shards all processes take as many, as each needs the others' parts of the parameters.
    Who has no more examples takes the data's first, with its loss times 0.
    """
    share = in_order(mechanism.ranks.share(drawn), order)  # shares first: orders may differ between processes
    most = -(-len(drawn) // mechanism.ranks.replicas) if mechanism.in_shards else len(share)
    rows = {start: share[start : start + size] for start in range(0, max(most, 1), size)}
    first = np.zeros(1, dtype=drawn.dtype)
    return [(start, own if len(own) else first, not len(own)) for start, own in rows.items()]


def in_order(drawn: np.ndarray, order: Order | None) -> np.ndarray:
    """The examples of a batch, (n,), as ``order`` puts them.

    Raises:
        UserError: it gives others than were drawn, or no integers.
    """
    if order is None:
        return drawn
    ordered = np.asarray(order(drawn))
    if ordered.shape != drawn.shape or not np.array_equal(np.sort(ordered), drawn):
        raise UserError(
            "order gave other examples than were drawn, which no account of epsilon covers: return the numbers that "
            "it is given, each once."
        )
    if ordered.size and ordered.dtype.kind not in "iu":
        raise UserError(f"order gave numbers of type {ordered.dtype}: return the integers that it is given, each once.")
    return ordered


def length_of(data: Any) -> int:
    """N, of a dataset whose examples have numbers.

    Raises:
        UserError: a loader, a table, columns of examples, or anything without a length and numbered examples.
    """
    if isinstance(data, DataLoader):
        raise UserError(
            "data is a DataLoader, whose batches are not drawn as the account of epsilon has it: give its dataset "
            "(loader.dataset), and draw with private.batches(...)."
        )
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"data is a {type(data).__name__} without a length or numbered examples; Poisson sampling needs both: give "
            "a dataset with __len__ and __getitem__."
        )
    if hasattr(type(data), "iloc") or (isinstance(data, Mapping) and 0 not in data):  # iloc: of pandas
        raise UserError(
            f"data is a {type(data).__name__}, whose data[0] is no example: give torch.utils.data.TensorDataset(x, y) "
            "of its columns, or a list of examples."
        )
    few = data if isinstance(data, tuple | list) and len(data) < 5 else ()
    rows = {len(each) for each in few if isinstance(each, torch.Tensor | np.ndarray) and each.ndim}
    if len(rows) == 1 and max(rows) > len(data):
        raise UserError(
            f"data is a {type(data).__name__} of {len(data)} columns of {max(rows)} rows, not of examples: give "
            "torch.utils.data.TensorDataset(x, y), whose examples are the rows."
        )
    return len(data)


def print_of(data: Any, noise: NoiseSource) -> str | None:
    """A digest of the first, middle and last example, by which processes see whether they hold the same data.

    Default generators are the key's meanwhile. None where an example is another each time that it is read, or holds
    something else than numbers, texts and arrays of numbers.
    """
    rows = (0, len(data) // 2, len(data) - 1)
    digests = set()
    for _ in range(2):
        with secret_randomness(noise.child("print"), 0):
            digests.add(_digest([data[row] for row in rows]))
    return digests.pop() if len(digests) == 1 else None


def _digest(nested: Any) -> str | None:
    told = sha256()
    for leaf in tree_leaves(nested):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().view(torch.uint8).numpy() if leaf.dim() else leaf.item()
        if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            told.update(leaf.tobytes())
        elif isinstance(leaf, bytes | str | int | float | None):
            told.update(repr(leaf).encode())
        else:
            return None
    return told.hexdigest()


def check_processes(ranks: Alone | Ranks) -> None:
    """Refuse to draw alone where several processes train: theirs would be releases of their own, summed by nobody.

    Raises:
        UserError: torch.distributed has more processes than ``ranks``.
    """
    there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if there > ranks.replicas * ranks.stages:
        raise UserError(
            f"{there} processes train, and make_private knows of {ranks.replicas}: give it ranks=Ranks(), or start one "
            "process (devices=1, num_processes=1)."
        )


def check_loading(num_workers: Any, collate_fn: Any, order: Any) -> None:
    """Refuse what no loader takes.

    Raises:
        UserError: naming the argument.
    """
    if not isinstance(num_workers, Real) or not is_whole(num_workers) or num_workers < 0:  # type: ignore[arg-type]
        raise UserError(f"num_workers={num_workers!r} is out of range: give a whole number of at least 0.")
    for name, value, takes in (("collate_fn", collate_fn, "a list of examples"), ("order", order, "examples' numbers")):
        if value is not None and not callable(value):
            raise UserError(f"{name}={value!r} does not fit: give a function of {takes}, or leave it out.")


def load(
    data: Any,
    places: Iterable[Place],
    noise: NoiseSource,
    process: int,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pin_memory: bool,
) -> Iterator[Any]:
    """What ``collate_fn`` makes of the examples of each place, in order.

    Torch's, Python's and numpy's default generators are the key's while examples are read, in worker processes too.
    """
    return iter(
        DataLoader(
            _Microbatches(data, collate_fn or default_collate, noise.child("data"), process),
            batch_size=None,
            sampler=places,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else the loader draws its workers' seeds from the caller's
        )
    )


@dataclass(frozen=True)
class _Microbatches(Dataset[Any]):
    data: Any
    collate: Callable[[list[Any]], Any]
    noise: NoiseSource
    """Not the one of the model's masks: an augmentation must not repeat them."""
    process: int

    def __getitem__(self, place: Place) -> Any:
        step, start, rows = place
        with secret_randomness(self.noise, step, start, process=self.process):
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(list(rows)))
            return self.collate([self.data[row] for row in rows])


def _as_it_is(batch: Any) -> Any:
    return batch
