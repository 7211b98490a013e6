"""The canaries as a task for the real trainer, and the sampler that leaves out those not in the data."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.training.feed import Microbatch, fill
from groupwise.training.task import Split, Task


class Sampler(Protocol):
    """As `groupwise.privacy.PoissonSampler`."""

    def indices(self, step: int) -> np.ndarray:
        """The examples of a step, (n,)."""


class CanaryTask(Task):
    """A model of canaries, and nothing to evaluate."""

    splits = ()

    def __init__(self, model: nn.Module, canaries: int) -> None:
        self.model, self.train_size = model, canaries

    def losses(self, examples: Sequence[int] | np.ndarray) -> Tensor:
        """One loss each, (n,)."""
        return self.model(torch.as_tensor(np.asarray(examples, dtype=np.int64)))

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """Nothing."""
        return {}

    def describe_data(self) -> dict[str, Any]:
        """How many."""
        return {"train_examples": self.train_size, "source": "canaries"}

    def feed(self, split: Split, device: torch.device) -> "CanaryFeed":
        """Their numbers, for a pipeline."""
        return CanaryFeed(self.train_size)


class CanaryFeed:
    """A canary is its number, which every stage gets; see `groupwise.training.feed.Feed`."""

    def __init__(self, canaries: int) -> None:
        self._canaries = canaries

    def __len__(self) -> int:
        return self._canaries

    def order(self, examples: np.ndarray) -> np.ndarray:
        """As they are."""
        return examples

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`."""
        if not len(examples):
            return []
        filling = fill(examples, size, least)
        made = []
        for rows, absent in zip(filling.rows, filling.absent.tolist(), strict=True):
            who = torch.from_numpy(rows)
            weights = (torch.arange(len(rows)) < len(rows) - absent).float()
            made.append(Microbatch(who.unsqueeze(1), {"labels": who, "weights": weights}, absent))
        return made


class Present:
    """The draws of another sampler, without the examples that are not in the data.

    Poisson draws are independent, so what is left is a Poisson sample of the data that are there, at the same rate.
    """

    def __init__(self, sampler: Sampler, present: np.ndarray) -> None:
        self._sampler, self._present = sampler, present

    def indices(self, step: int) -> np.ndarray:
        """The examples of step ``step`` that are there, (n,)."""
        drawn = self._sampler.indices(step)
        return drawn[self._present[drawn]]


def own_gradients(
    losses_of: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, canaries: int, at_once: int
) -> dict[str, Tensor]:
    """Parameter name → every canary's unclipped gradient in it, (m, d_p), from an unattached model.

    No two canaries share an entry, so the gradient of all losses together holds each canary's own in its slice.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for who in torch.arange(canaries).split(at_once):
        losses_of(model, who).sum().backward()
    found = {}
    for name, parameter in named.items():
        assert parameter.grad is not None
        found[name] = by_canary(parameter.grad, canaries)
        parameter.grad = None
    return found


def by_canary(tensor: Tensor, canaries: int) -> Tensor:
    """A tensor with one axis of length m as (m, d)."""
    return tensor.movedim(list(tensor.shape).index(canaries), 0).reshape(canaries, -1)
