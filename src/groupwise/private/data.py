"""Reads the examples that were drawn, with torch's DataLoader; what a dataset draws at random follows the key."""

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from groupwise.clipping.unchanged import Generators
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.privacy.accountants import is_whole
from groupwise.training.microbatches import Microbatches
from groupwise.training.private_step import LossesOf, PrivateStep
from groupwise.training.ranks import Alone, Ranks

Place = tuple[int, int, Sequence[int]]
"""Of a microbatch: its step, where it begins in this process's share of the batch, and its examples."""

Order = Callable[[np.ndarray], np.ndarray]
"""The numbers of a batch's examples, (n,), to the same numbers in the order in which they share microbatches."""


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
        UserError: a table, columns of examples, or anything without a length and numbered examples.
    """
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


def fingerprint(data: Any, noise: NoiseSource) -> str | None:
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
    digest = sha256()
    for leaf in tree_leaves(nested):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().view(torch.uint8).numpy() if leaf.dim() else leaf.item()
        if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            digest.update(leaf.tobytes())
        elif isinstance(leaf, bytes | str | int | float | None):
            digest.update(repr(leaf).encode())
        else:
            return None
    return digest.hexdigest()


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


def check_loading(microbatch: Any, num_workers: Any, collate_fn: Any, order: Any) -> None:
    """Refuse what no loader takes.

    Raises:
        UserError: naming the argument.
    """
    for name, value, least in (("microbatch", microbatch, 1), ("num_workers", num_workers, 0)):
        if value is not None and not (isinstance(value, Real) and is_whole(value) and value >= least):  # type: ignore
            raise UserError(f"{name}={value!r} is out of range: give a whole number of at least {least}.")
    for name, value, takes in (("collate_fn", collate_fn, "a list of examples"), ("order", order, "examples' numbers")):
        if value is not None and not callable(value):
            raise UserError(f"{name}={value!r} does not fit: give a function of {takes}, or leave it out.")


@dataclass(frozen=True)
class Loading:
    """How examples become a batch, as in ``torch.utils.data.DataLoader``."""

    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    pin_memory: bool = False


def taken_apart(data: Any, loading: dict[str, Any]) -> tuple[Any, Loading]:
    """A dataset, and how it is read: as asked, else as the DataLoader that was given in its place has it.

    Args:
        data: a dataset, or a loader of one, whose sampler and batch size are not used.
        loading: fields of `Loading`; None where nothing was asked.
    """
    asked = {name: value for name, value in loading.items() if value is not None}
    if isinstance(data, DataLoader):
        warnings.warn(
            "data is a DataLoader: its dataset, collate function and workers are used; its sampler and batch size are "
            "not, as every step draws each example with probability batch_size / N.",
            stacklevel=3,
        )
        own = {"collate_fn": data.collate_fn, "num_workers": data.num_workers, "pin_memory": data.pin_memory}
        return data.dataset, Loading(**{**own, **asked})
    return data, Loading(**asked)


class DatasetSums(Microbatches):
    """Clipped sums of batches that are drawn from a dataset.

    Args:
        model: whose losses are computed.
        data: N examples by number.
        losses: (model, batch) -> one loss for each of the batch's examples, (b,).
        loading: how examples become a batch.
        order: the numbers of this process's examples of a batch, (n,), in the order in which they share microbatches.
        size: examples at once, at most.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        losses: Callable[[nn.Module, Any], Tensor],
        loading: Loading,
        order: Order | None,
        size: int,
    ) -> None:
        super().__init__(size)
        self.data, self.losses, self.loading, self.order = data, losses, loading, order
        self._model = model
        self._loaded: Iterator[Any] | None = None
        self._place: tuple[int, int] = (-1, 0)
        """Step and size of the microbatch that the workers give next."""

    def share(self, drawn: np.ndarray, ranks: Alone | Ranks) -> np.ndarray:
        """This process's examples, in order: shared first, as orders may differ between processes."""
        return in_order(ranks.share(drawn), self.order)

    def losses_of(self, rows: Sequence[int]) -> Tensor:
        """The losses (n,) of examples that are read now."""
        return self.losses(self._model, self._read(rows))

    def losses_of_some(self, rows: Sequence[int]) -> LossesOf:
        """The same for some of these examples, which are read once, past the generators: each is what it is in all
        passes, and so are the masks of the model."""
        items: dict[int, Any] = {}

        def losses_of(some: Sequence[int]) -> Tensor:
            if not items:
                with Generators(()).kept():
                    items.update(zip(map(int, rows), self._items(rows), strict=True))
            return self.losses(self._model, self.loading.collate_fn([_own(items[int(row)]) for row in some]))

        return losses_of

    def begin(self, private: PrivateStep, step: int) -> None:
        """Have the workers read ahead, from this step on, unless they are there already."""
        if not self.loading.num_workers or self._place == (step, self.size):
            return
        places = self._places(private, step)
        reader = _Reader(self._read, private.noise.child("data"), private.ranks.replica)
        self._loaded = iter(
            DataLoader(
                reader,
                batch_size=None,
                sampler=places,
                collate_fn=_as_it_is,
                num_workers=self.loading.num_workers,
                pin_memory=self.loading.pin_memory,
                generator=torch.Generator(),  # else the loader draws its workers' seeds from the caller's
            )
        )

    def _places(self, private: PrivateStep, first: int) -> Iterator[Place]:
        for step in range(first, private.plan.steps):
            drawn = private.sampler.indices(step)
            for start, rows, _ in self.parts(private, self.share(drawn, private.ranks), drawn):
                yield step, start, rows.tolist()

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, filler: bool) -> Tensor:
        """See `Microbatches`; a batch may be read once more, to be traced."""
        if self._loaded is not None:
            self._place = (-1, 0)  # in the middle of a step; what fails there begins again
            batch = next(self._loaded)
        else:
            batch = _Reader(self._read, private.noise.child("data"), private.ranks.replica)[step, start, rows.tolist()]
            batch = _pinned(batch) if self.loading.pin_memory and torch.cuda.is_available() else batch

        again = self.losses_of_some(rows)  # type: ignore[arg-type]  # an array is a sequence of numbers

        def losses_of(some: Any) -> Tensor:
            if some is not rows:
                return again(some)
            return self.losses(self._model, _own(batch))

        return private.clip(losses_of, rows, filler)  # type: ignore[arg-type]

    def end(self, private: PrivateStep, step: int) -> None:
        """The workers' next microbatch is the next step's first."""
        self._place = (step + 1, self.size)

    def forget(self) -> None:
        """Let the workers go."""
        self._loaded, self._place = None, (-1, 0)

    def _read(self, rows: Sequence[int]) -> Any:
        return self.loading.collate_fn(self._items(rows))

    def _items(self, rows: Sequence[int]) -> list[Any]:
        if hasattr(self.data, "__getitems__"):
            return list(self.data.__getitems__(list(rows)))
        return [self.data[row] for row in rows]


@dataclass(frozen=True)
class _Reader(Dataset[Any]):
    """Reads a microbatch by its place; default generators are the key's meanwhile, in worker processes too."""

    read: Callable[[Sequence[int]], Any]
    noise: NoiseSource
    """Not the one of the model's masks: an augmentation must not repeat them."""
    process: int

    def __getitem__(self, place: Place) -> Any:
        step, start, rows = place
        with secret_randomness(self.noise, step, start, process=self.process):
            return self.read(rows)


def _pinned(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, batch)


def _own(value: Any) -> Any:
    """A copy of a dict or list, for who may take labels out of it."""
    return copy(value) if isinstance(value, MutableMapping | list) else value


def _as_it_is(batch: Any) -> Any:
    return batch


SAMPLE = 12
"""Examples among which those to be traced are chosen."""


def examples_to_trace(data: Any, size: int, most: int = 6) -> list[int]:
    """Numbers of some examples from all over a dataset of N, the largest first: it pads their batches alike.

    Raises:
        UserError: there is one alone.
    """
    some = list(dict.fromkeys(np.linspace(0, size - 1, SAMPLE).round().astype(int).tolist()))
    sizes = {row: sum(_numel(leaf) for leaf in tree_leaves(data[row])) for row in some}
    some.sort(key=lambda row: -sizes[row])  # the largest, then the smallest, then between them, from all over the data
    if len(some) < 2:
        raise UserError("data has one example, and two are needed to see that they keep apart: give more.")
    between = some[1:-1]
    return [some[0], some[-1], *between[:: max(1, len(between) // (most - 2))]][:most]


def _numel(leaf: Any) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return int(leaf.numel() if isinstance(leaf, Tensor) else leaf.size)
    return len(leaf) if isinstance(leaf, str | bytes) else 1
