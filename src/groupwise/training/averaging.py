"""Averages the weights over a run, exponentially, and lends them to evaluations and to what is saved."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The exponential moving average of trainable parameters, as De et al. (2022) evaluate it.

    After step t (from 0) the average moves towards the weights by 1 - min(decay, (1 + t) / (10 + t)), so the first
    steps weigh no more than they should. It is computed from released weights alone and costs no privacy.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._decay = decay
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, to the bit."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> list[Tensor]:
        """The averages, in the order of the parameters."""
        return list(self._average)

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        for average, value in zip(self._average, state, strict=True):
            average.copy_(value)
