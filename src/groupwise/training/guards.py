"""Detects code in the losses that reads or changes clipped sums before the noise, or puts data into the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.privacy.randomness import refuse_another_seed


@contextmanager
def unfitted(model: nn.Module) -> Iterator[None]:
    """In the passes before training, raise a `UserError` if a buffer or parameter has other values at the end.

    Some modules set them from the first batch. Those of another shape, which were made lazily, are not compared.
    """

    def totals() -> dict[tuple[str, torch.Size], str]:
        named = ((name, t.detach()) for name, t in (*model.named_parameters(), *model.named_buffers()))
        own = {name: getattr(t, "_local_tensor", t) for name, t in named if t.element_size() > 1 and not t.is_complex()}
        return {(name, t.shape): repr(float(t.sum(dtype=torch.float64))) for name, t in own.items()}

    before = totals()
    yield
    for (name, shape), total in totals().items():
        if before.get((name, shape), total) != total:
            raise UserError(
                f"The first forward pass changed {name!r}, a buffer or parameter, so it now depends on examples "
                "without clipping and noise: run that pass on public data before the training."
            )


class StepGuard:
    """Checks a model while the clipped sums of a batch are computed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Compute a batch's clipped sums inside: a hook, or a changed buffer or parameter, raises `UserError`."""
        for name, parameter in self._trainable.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"Parameter {name!r} has a hook, which could read or change clipped sums before the noise: remove "
                    "the hook."
                )
        before = self._versions()
        yield
        after = self._versions()
        for name in (*before, *after):
            if before.get(name) != after.get(name):
                raise UserError(
                    f"The losses changed {name!r}, a buffer or parameter, so it now depends on examples without "
                    "clipping and noise: do not change it there, and put modules with running statistics into eval "
                    "mode before make_private."
                )

    @contextmanager
    def losses(self) -> Iterator[None]:
        """Compute the losses of a microbatch inside: seeding torch, or setting a gradient, raises `UserError`.

        Each `.grad` is None inside, so that the losses cannot read the clipped sums of earlier microbatches.
        """
        sums = [parameter.grad for parameter in self._trainable.values()]
        for parameter in self._trainable.values():
            parameter.grad = None
        try:
            yield
            if any(parameter.grad is not None for parameter in self._trainable.values()):
                raise UserError(
                    "The losses set gradients of the model, which would get no clipping: remove backward() from them."
                )
        finally:
            for parameter, gradient in zip(self._trainable.values(), sums, strict=True):
                parameter.grad = gradient
        refuse_another_seed()

    def _versions(self) -> dict[str, tuple[int, int]]:
        """The identity of each buffer and parameter, and torch's counter of its in-place changes."""
        named: tuple[tuple[str, Any], ...] = (*self._model.named_buffers(), *self._model.named_parameters())
        return {name: (id(tensor), getattr(tensor, "_local_tensor", tensor)._version) for name, tensor in named}
