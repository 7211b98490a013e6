"""Runs a few examples through a model, on the same random numbers each time, and tells where two runs differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from groupwise.clipping.checks import check_losses
from groupwise.clipping.randomness import Draw, Draws
from groupwise.clipping.unchanged import Generators

Border = Callable[[str, Any], None]
"""Called when a forward pass enters a module ("the input of ...", arguments) or leaves it ("the output of ...")."""

OUTSIDE = "the loss, outside of the model's modules"
LEAST_LOSS = 0.1
"""A loss has the rounding of the numbers that it comes from, however small it is: smaller ones are compared as this."""


class Runs:
    """Forward passes of a model that always begin with the same random numbers.

    Args:
        model: in which modules are followed.
        losses_of: indices of examples -> their losses, (n,).
        generators: those that are seeded.
    """

    def __init__(self, model: nn.Module, losses_of: Callable[[Sequence[int]], Tensor], generators: Generators) -> None:
        self.model, self.losses_of, self.generators = model, losses_of, generators
        self._open: list[str] = []

    def place(self) -> str:
        """The module whose code runs, in words; inside of `drawing` only."""
        return self._open[-1] if self._open else OUTSIDE

    def losses(self, examples: Sequence[int]) -> Tensor:
        """As `losses_of`, (n,).

        Raises:
            UserError: they are not one number for each example.
        """
        self.generators.seed(0)
        losses = self.losses_of(examples)
        check_losses(losses, len(examples), traced=True)
        return losses

    @contextmanager
    def drawing(
        self, calm: bool = False, border: Border | None = None, forced: tuple[Draw, float] | None = None
    ) -> Iterator[Draws]:
        """Inside, modules are followed, and random numbers are noted, calmed or forced (see `Draws`)."""
        self._open.clear()
        hooks = []
        for name, module in self.model.named_modules():
            label = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            enter, leave = partial(self._enter, label, border), partial(self._leave, label, border)
            hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
        try:
            with Draws(self.place, self.generators, calm, forced) as draws:
                yield draws
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, label: str, border: Border | None, module: nn.Module, *given: Any) -> None:
        if border is not None:
            border(f"the input of {label}", given)
        self._open.append(label)

    def _leave(self, label: str, border: Border | None, module: nn.Module, given: Any, made: Any) -> None:
        if border is not None:
            border(f"the output of {label}", made)
        self._open.pop()

    def first_difference(
        self, one: Sequence[int], other: Sequence[int], kept: Sequence[int], calm: bool = False
    ) -> str:
        """Where the kept rows of two batches part in a forward pass, as an insertion into a sentence; or nothing."""
        before, after = (self._fingerprints(batch, kept, calm) for batch in (one, other))
        for (place, ours), (there, theirs) in zip(before, after, strict=False):
            pairs = zip(ours, theirs, strict=False)
            if place != there or len(ours) != len(theirs) or any(moved_rows(*pair, 1e-4) for pair in pairs):
                return f" (first seen in {place})"
        return ""

    def _fingerprints(self, batch: Sequence[int], kept: Sequence[int], calm: bool) -> list[tuple[str, list[Tensor]]]:
        """Of some rows of every tensor that enters or leaves a module, in the order of the calls, and of the losses.

        Tensors whose first axis is not made of the batch are left out.
        """
        taken: list[tuple[str, list[Tensor]]] = []

        def take(place: str, values: Any) -> None:
            tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf))
            rows = (t.reshape(len(batch), -1) for t in tensors if len(t) % len(batch) == 0)
            taken.append((place, [fingerprints(t, 0)[list(kept)] for t in rows]))

        with self.drawing(calm, take):
            take("the losses", self.losses(batch))
        return taken


def fingerprints(x: Tensor, axis: int | None) -> Tensor:
    """A projection of each row and its norm, (rows, 2) float64 on the CPU; the whole is one row where axis is None."""
    x = torch.view_as_real(x) if x.is_complex() else x
    rows = x.detach().reshape(1, -1) if axis is None else x.detach().movedim(axis, 0).reshape(x.shape[axis], -1)
    rows = rows.double().nan_to_num(0.12345, 1e30, -1e30)
    numbers = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=x.device)
    direction = torch.frac(numbers.mul_(0.6180339887498949)).sub_(0.4142135623730951)
    return torch.stack([rows @ direction, torch.linalg.vector_norm(rows, dim=1)], 1).cpu()


def moved_rows(one: Tensor, two: Tensor, tolerance: float = 1e-6) -> list[int]:
    """Rows whose fingerprints, (rows, 2), differ by more than rounding."""
    scale = torch.maximum(one[:, 1:], two[:, 1:])
    return ((one - two).abs() > tolerance * scale).any(1).nonzero().flatten().tolist()


def moved_losses(before: Tensor, after: Tensor, tolerance: float) -> list[int]:
    """Which losses (n,) differ by more than a share of themselves; two that are not finite are alike."""
    before, after = before.detach().double().cpu(), after.detach().double().cpu()
    apart = (before - after).abs() > tolerance * after.abs().clamp_min(LEAST_LOSS)
    return (apart | (before.isfinite() != after.isfinite())).nonzero().flatten().tolist()
