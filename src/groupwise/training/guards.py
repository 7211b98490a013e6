"""Refuses, while a step runs, what would release clipped sums without noise or change them after clipping."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from groupwise.errors import UserError
from groupwise.privacy.randomness import refuse_another_seed


@contextmanager
def optimizers_blocked(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, an optimizer that steps on any of these parameters raises `UserError`: their gradients have no noise."""
    blocked = {id(parameter) for parameter in parameters}

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in blocked for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                "An optimizer stepped inside of a private step, on gradients that have no noise yet: leave "
                "optimizer.step() out of the losses and of hooks, as the private step calls it."
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


class StepGuard:
    """Watches a model while the clipped sums of a batch are formed.

    Args:
        model: that is trained privately.
        trainable: its trainable parameters.
    """

    def __init__(self, model: nn.Module, trainable: Sequence[nn.Parameter]) -> None:
        self._model, self._trainable = model, trainable

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around the sums of a batch.

        Raises:
            UserError: an optimizer stepped; a parameter has a hook; a buffer or frozen parameter was changed.
        """
        self._refuse_hooks()
        before = self._constants()
        with optimizers_blocked(self._trainable):
            yield
        after = self._constants()
        changed = (name for name in (*before, *after) if before.get(name) != after.get(name))
        if (name := next(changed, None)) is not None:
            raise UserError(
                f"{name!r}, a buffer or frozen parameter, was changed by the losses, so it carries what it saw past "
                "all clipping and noise: put its module into eval mode for good, or use one without running state."
            )

    @contextmanager
    def losses(self) -> Iterator[None]:
        """Around the losses of a microbatch, which do not see the sums of those before it: `.grad` is None inside.

        Raises:
            UserError: torch was seeded; a parameter got a hook or a gradient; a trainable parameter was changed.
        """
        sums = [parameter.grad for parameter in self._trainable]
        before = self._versions(sums)
        for parameter in self._trainable:
            parameter.grad = None
        try:
            yield
            changed = any(p.grad is not None for p in self._trainable) or self._versions(sums) != before
        finally:
            for parameter, gradient in zip(self._trainable, sums, strict=True):
                parameter.grad = gradient
        refuse_another_seed()
        self._refuse_hooks()
        if changed:
            raise UserError(
                "The losses changed gradients or weights of the model by themselves, past the clipping and the noise: "
                "leave backward(), zero_grad() and changes of parameters out of them."
            )

    def _refuse_hooks(self) -> None:
        for parameter in self._trainable:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                name = next((name for name, other in self._model.named_parameters() if other is parameter), "")
                raise UserError(
                    f"Parameter {name!r} has a hook, which sees clipped sums without noise and may change them: remove "
                    "it."
                )

    def _constants(self) -> dict[str, tuple[int, int]]:
        """Which buffers and frozen parameters there are, and how often each was changed in place."""
        frozen = ((name, p) for name, p in self._model.named_parameters() if not p.requires_grad)
        return {name: (id(tensor), tensor._version) for name, tensor in (*self._model.named_buffers(), *frozen)}

    def _versions(self, sums: Sequence[Tensor | None]) -> list[int]:
        """How often the parameters and their gradients were changed in place."""
        tensors: list[Any] = [*self._trainable, *(gradient for gradient in sums if gradient is not None)]
        shards = [tensor._local_tensor for tensor in tensors if hasattr(tensor, "_local_tensor")]
        return [tensor._version for tensor in (*tensors, *shards)]
