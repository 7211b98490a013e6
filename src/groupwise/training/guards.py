"""Detects, during a step, code that would use clipped sums without noise, or change them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.privacy.randomness import refuse_another_seed


@contextmanager
def unfitted(model: nn.Module) -> Iterator[None]:
    """Use it around the passes before training, in which some modules set their state from the first batch.

    Raises:
        UserError: a buffer or parameter of the same shape has other values afterwards.
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
                f"{name!r}, a buffer or parameter, was changed by the first forward pass, so it keeps data of the "
                "examples without clipping and noise: run that pass on public data before make_private."
            )


class StepGuard:
    """Watches a model while the clipped sums of a batch are formed.

    Args:
        model: the model that is trained privately.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Use it around the computation of a batch's sums.

        Raises:
            UserError: a parameter has a hook; a buffer or parameter was changed.
        """
        self._refuse_hooks()
        before = self._versions()
        yield
        after = self._versions()
        for name in (*before, *after):
            if before.get(name) != after.get(name):
                raise UserError(
                    f"The losses changed {name!r}, a buffer or parameter, which then holds data of the examples "
                    "without clipping and noise: do not change it there; put modules with running statistics into "
                    "eval mode before make_private."
                )

    @contextmanager
    def losses(self) -> Iterator[None]:
        """Use it around the losses of a microbatch. Inside, `.grad` is None, to hide the sums of earlier microbatches.

        Raises:
            UserError: torch was seeded; a parameter got a gradient.
        """
        sums = [parameter.grad for parameter in self._trainable.values()]
        for parameter in self._trainable.values():
            parameter.grad = None
        try:
            yield
            if any(parameter.grad is not None for parameter in self._trainable.values()):
                raise UserError(
                    "The losses set gradients of the model themselves, without clipping and noise: leave backward() "
                    "out of them."
                )
        finally:
            for parameter, gradient in zip(self._trainable.values(), sums, strict=True):
                parameter.grad = gradient
        refuse_another_seed()

    def _refuse_hooks(self) -> None:
        for name, parameter in self._trainable.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"Parameter {name!r} has a hook, which could read or change clipped sums before the noise: remove "
                    "it."
                )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """The identity of each buffer and parameter, and its in-place version counter."""
        frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        there: dict[str, Any] = {**dict(self._model.named_buffers()), **frozen, **self._trainable}
        return {name: (id(tensor), getattr(tensor, "_local_tensor", tensor)._version) for name, tensor in there.items()}
