"""Runs backward passes from the losses, and says in one sentence what torch cannot do in them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from groupwise.clipping.gate import no_autocast
from groupwise.errors import UserError


def run_backward(losses: Tensor) -> None:
    """Add the gradients of the sum of the losses (B,) to the parameters' .grad, by way of their gates.

    Raises:
        UserError: a kept tensor was changed in place; a checkpoint that does not compute the same again.
    """
    with _in_one_sentence(), no_autocast(losses.device.type):  # gradients in the precision in which they were attached
        losses.sum().backward()


def squared_norms_of(losses: Tensor, probe: Tensor) -> Tensor:
    """The layers' squared norms (B,) as the probe's gradient; the graph stays for a second pass.

    Raises:
        UserError: as `run_backward`.
    """
    with _in_one_sentence(), no_autocast(losses.device.type):
        (squares,) = torch.autograd.grad(losses.sum(), probe, retain_graph=True)
    return squares


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        if isinstance(error, CheckpointError):
            raise UserError(
                "Activation checkpointing did not compute the same tensors again: what it runs must not depend on what "
                f"changes between forward and backward pass. torch says: {first}"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise UserError(
                "A tensor that a layer keeps for its backward pass was changed in place (by ReLU(inplace=True) after "
                f"a WSConv2d, say): use operations that are not in place. torch says: {first}"
            ) from error
        raise
