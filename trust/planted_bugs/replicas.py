"""Replicas of one run in one process, so that thousands of steps of many of them are quick.

A step of a replica is one piece of work up to the sum over all replicas, and another after it. All replicas but the
first do the first piece and stop; the first then takes its whole step with what the others had to add. What it releases
is what each of them would release.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from groupwise.training.ranks import Alone
from groupwise.training.step import Trainer


class Handed(Exception):
    """A replica has handed in what is to be summed."""


class InTurn(Alone):
    """What `groupwise.training.ranks.Ranks` does in a step, for replicas that take their turns.

    Args:
        replica: d. hands: of all D replicas, what they handed in.
    """

    def __init__(self, replica: int, hands: list[list[Tensor]]) -> None:
        self.replica, self.replicas, self._hands = replica, len(hands), hands

    def share(self, examples: np.ndarray) -> np.ndarray:
        """Every D-th example."""
        return examples[self.replica :: self.replicas]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the replicas, in place, on the first; the others hand in and stop."""
        self._hands[self.replica] = [tensor.clone() for tensor in tensors]
        if self.replica:
            raise Handed
        for tensor, *of_all in zip(tensors, *self._hands, strict=True):
            tensor.copy_(torch.stack(of_all).sum(0))


class Together:
    """Takes replicas with equal weights through a step; the first one's weights move, the others' stay.

    So it is for plays of one step, or for gradients that do not depend on the weights.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        hands: list[list[Tensor]] = [[] for _ in trainers]
        for replica, trainer in enumerate(trainers):
            trainer.mechanism.ranks = InTurn(replica, hands)
        self._first, *self._others = trainers

    def __call__(self, step: int) -> None:
        for trainer in self._others:
            try:
                trainer.step(step)
            except Handed:
                continue
            raise AssertionError("a replica took a step without a sum over all of them")
        self._first.step(step)
