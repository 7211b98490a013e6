"""Computes the clipped sums of batches of a dataset, whose random augmentation is seeded from the noise key."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from groupwise.clipping.checks import LossesOf
from groupwise.clipping.unchanged import Generators
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.private.data import read_items
from groupwise.training.graphs import Graphs
from groupwise.training.microbatches import Microbatches
from groupwise.training.private_step import PrivateStep
from groupwise.training.task import to_device

Place = tuple[int, int, Sequence[int]]
"""A microbatch: its step, the index of its first example in this process's share of the batch, and its examples."""


class DatasetSums(Microbatches):
    """Clipped sums of batches of a dataset.

    Args:
        size, graphs: see `Microbatches`.
        model, data, losses, others: see `groupwise.make_private`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        losses: Callable[[nn.Module, Any], Tensor],
        size: int,
        graphs: Graphs | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(size, graphs)
        self.data, self.losses = data, losses
        self.collate_fn, self.num_workers, self.pin_memory = collate_fn, num_workers, pin_memory
        self._model = model
        self._at_once = _rows_of(data) if collate_fn is default_collate else None
        """For a `TensorDataset`, a function that reads all examples of a microbatch at once."""
        self._step = -1
        """The step of the last microbatch."""

    def losses_of(self, rows: Sequence[int], now: bool = False) -> LossesOf:
        """A function that returns the losses of some of the examples in `rows`.

        The examples are read only once, in its first call, or at once with `now`. Reading leaves the random generators
        unchanged. So examples and dropout masks are the same in every call.
        """

        @cache
        def items() -> dict[int, Any]:
            with Generators(()).kept():
                return dict(zip(map(int, rows), read_items(self.data, rows), strict=True))

        if now:
            items()

        def losses_of(some: Sequence[int]) -> Tensor:
            return self.losses(self._model, self.collate_fn([_own(items()[int(row)]) for row in some]))

        def also_alone(some: Sequence[int]) -> Tensor:
            try:
                return losses_of(some)
            except (RuntimeError, ValueError, IndexError) as error:
                if len(some) == 1 and not isinstance(error, UserError):
                    losses_of([*some, *some])  # raises too if it is not the size
                    raise UserError(
                        f"The losses fail for a batch of one example, which a Poisson batch may be ({error}): keep the "
                        "batch axis, by squeeze(1) in place of squeeze(), for example."
                    ) from error
                raise

        return also_alone

    def run(self, private: PrivateStep, step: int, start: int, rows: np.ndarray, present: Tensor | None) -> Tensor:
        """See `Microbatches`. A microbatch that must be traced is read a second time."""
        batch = self._batch(private, step, start, rows)
        if self.pin_memory and torch.cuda.is_available():
            batch = tree_map_only(Tensor, Tensor.pin_memory, batch)  # as it is, if a worker's batch is pinned already
        again = self.losses_of(rows)  # type: ignore[arg-type]  # an array is a sequence of numbers

        def losses_of(batch: Any, some: Any) -> Tensor:
            return self.losses(self._model, _own(batch)) if some is rows else again(some)

        if self.graphs is None or present is None:
            return private.clip(partial(losses_of, batch), rows, present)  # type: ignore[arg-type]
        batch = tree_map_only(Tensor, lambda leaf: to_device(leaf, private.device), batch)
        return self.graphs.clip(private, rows, present, batch, losses_of)

    def forget(self) -> None:
        """End the worker processes."""
        super().forget()
        PREFETCHED.pop(self, None)

    def _batch(self, private: PrivateStep, step: int, start: int, rows: np.ndarray) -> Any:
        if self._at_once is not None:
            return self._at_once(rows)
        reader = _Reader(self.data, self.collate_fn, private.noise.child("data"), private.ranks.replica)
        if not self.num_workers:
            return reader[step, start, rows.tolist()]
        if self not in PREFETCHED or (start == 0 and self._step == step):  # the step starts again
            loader = DataLoader(
                reader,
                batch_size=None,
                sampler=_places(proxy(self), proxy(private), step),
                collate_fn=_identity,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                generator=torch.Generator(),  # otherwise the loader would draw seeds from the caller's generator
            )
            PREFETCHED[self] = iter(loader)
        self._step = step
        return next(PREFETCHED[self])


PREFETCHED: WeakKeyDictionary[DatasetSums, Iterator[Any]] = WeakKeyDictionary()
"""The microbatches that worker processes prefetch. An iterator of a DataLoader that is collected as a part of a cycle
waits five seconds for each worker. So it is kept here, and not in a training that nobody detached."""


def _places(sums: DatasetSums, private: PrivateStep, first: int) -> Iterator[Place]:
    for step in range(first, private.plan.steps):
        drawn = private.sampler.indices(step)
        places = sums.split(private, drawn)
        yield from [(step, start, rows.tolist()) for start, rows, _ in places]  # a list, as the generator knows `sums`


def _rows_of(data: Any) -> Callable[[np.ndarray], list[Tensor]] | None:
    """A function that reads a batch of a `TensorDataset`, or of a `Subset` of one, at once; None for other datasets."""
    if type(data) is Subset:
        inner, places = _rows_of(data.dataset), np.asarray(data.indices)
        return None if inner is None else lambda rows: inner(places[rows])
    if type(data) is not TensorDataset:
        return None
    return lambda rows: [tensor.index_select(0, torch.from_numpy(rows).to(tensor.device)) for tensor in data.tensors]


@dataclass(frozen=True)
class _Reader(Dataset[Any]):
    """Reads microbatches. Inside, the default generators are seeded from the noise key, in worker processes too."""

    data: Any
    collate_fn: Callable[[list[Any]], Any]
    noise: NoiseSource
    """Another source than that of dropout masks, so that augmentation is independent of them."""
    process: int

    def __getitem__(self, place: Place) -> Any:
        step, start, rows = place
        with secret_randomness(self.noise, step, start, process=self.process):
            return self.collate_fn(read_items(self.data, rows))


def _own(value: Any) -> Any:
    """A shallow copy of a dict or list, so that `losses` may pop labels from it."""
    return copy(value) if isinstance(value, MutableMapping | list) else value


def _identity(batch: Any) -> Any:
    return batch
