"""Runs a few examples through a model, on the same random numbers each time, and tells where two runs differ.

It also notes which random numbers a forward pass draws, in which module, or gives their expectation instead.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.clipping.checks import check_losses
from groupwise.clipping.unchanged import Generators

Border = Callable[[str, Any], None]
"""Called when a forward pass enters a module ("the input of ...", arguments) or leaves it ("the output of ...")."""

OUTSIDE = "the loss, outside of the model's modules"
LEAST_LOSS = 0.1
"""A loss has the rounding of the numbers that it comes from, however small it is: smaller ones are compared as this."""


@dataclass(frozen=True)
class Draw:
    """One random operation: its name in torch, where it ran, the shapes of what it gave."""

    name: str
    place: str
    shapes: tuple[tuple[int, ...], ...]
    by_hand: bool
    """Whether the operation was given a generator."""
    calms: bool
    """Whether its expectation is known."""


class Draws(TorchDispatchMode):
    """Inside, random operations of torch are noted.

    Args:
        place: tells the module that runs.
        generators: to which those that an operation is given by hand are added.
        calm: give the expectation instead of random numbers (a dropout mask that keeps all, a slope in the middle), so
            that an example meets the same numbers alone as among others. The model stays in training mode. Operations
            that draw more or fewer numbers by the values that they meet (`FOLLOWING_VALUES`) always do, and what is
            drawn after them does not depend on how often they drew.
        forced: a draw, and the number that it and its like give instead of random ones.
    """

    def __init__(
        self,
        place: Callable[[], str],
        generators: Generators,
        calm: bool = False,
        forced: tuple[Draw, float] | None = None,
    ) -> None:
        super().__init__()
        self.taken: list[Draw] = []
        self._place, self._generators, self._calm, self._forced = place, generators, calm, forced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        by_hand = isinstance(given.get("generator"), torch.Generator)
        if by_hand:
            self._generators.add(given["generator"])
        name = func.overloadpacket.__name__
        calm = self._calm or name in FOLLOWING_VALUES
        changed = {"dropout_p": 0.0} if "dropout_p" in names else _CHANGED.get(name, lambda _: {})(given)
        if calm and changed:
            given |= changed
            args, kwargs = (
                [given[n] for n in names[: len(args)]],
                {n: given[n] for n in names[len(args) :] if n in given},
            )
        made = func(*args, **kwargs)
        shapes = tuple(tuple(t.shape) for t in tree_leaves(made) if isinstance(t, Tensor))
        draw = Draw(name, self._place(), shapes, by_hand, bool(changed) or name in _EXPECTED)
        self.taken.append(draw)
        if self._forced is not None and self._forced[0] == draw:
            made.fill_(self._forced[1])
        if calm and name in _EXPECTED:
            made.copy_(torch.as_tensor(_EXPECTED[name](given)))
        if name in FOLLOWING_VALUES and not self._calm:
            self._generators.seed_torch(len(self.taken))
        return made


def _middle(given: dict[str, Any]) -> dict[str, float]:
    return dict.fromkeys(("lower", "upper"), (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2)


_CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "native_dropout": lambda given: {"p": 0.0},
    "rrelu_with_noise": _middle,
    "rrelu_with_noise_": _middle,
}
"""Operations that draw inside and give something else: the arguments that take the chance out."""

FOLLOWING_VALUES = {
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
}
"""Operations that take more or fewer numbers from the generator by the values that they meet: what is drawn after them
is another number when one example is replaced, of the same law."""

_EXPECTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli": lambda given: given.get("p", given["self"]),
    "bernoulli_": lambda given: given.get("p", 0.5),
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "uniform_": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "randn": lambda given: 0.0,
    "randn_like": lambda given: 0.0,
    "normal": lambda given: given.get("mean", given.get("self", 0.0)),
    "normal_": lambda given: given.get("mean", 0.0),
    "exponential_": lambda given: 1 / given.get("lambd", 1.0),
    "randint": lambda given: given.get("low", 0),
    "randint_like": lambda given: given.get("low", 0),
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "multinomial": lambda given: 0,
    "random_": lambda given: given.get("from", 0),
    "log_normal_": lambda given: math.exp(given.get("mean", 1.0)),
    "geometric_": lambda given: 1,
    "cauchy_": lambda given: given.get("median", 0.0),
}
"""Operations that give random numbers: what they give on average, or at least always."""


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
