"""Runs a few examples through a model with the same random numbers each time, and finds where two runs differ.

It also records which random numbers a forward pass draws, and in which module, or replaces them by their expectation.
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

from groupwise.clipping.checks import LossesOf, check_losses
from groupwise.clipping.unchanged import Generators

Observe = Callable[[str, Any], None]
"""Called when a forward pass enters a module ("the input of ...", arguments) or leaves it ("the output of ...")."""

OUTSIDE = "the loss, outside of the model's modules"
LEAST_LOSS = 0.1
"""Losses below this are compared as if they were this large: their rounding comes from larger intermediate values."""


@dataclass(frozen=True)
class Draw:
    """One random operation: its name in torch, the module that ran it, and the shapes of its results."""

    name: str
    place: str
    shapes: tuple[tuple[int, ...], ...]
    by_hand: bool
    """Whether a generator was passed to the operation."""
    has_expectation: bool
    """Whether its expectation is known."""


class Draws(TorchDispatchMode):
    """Records torch's random operations inside.

    Args:
        runs: names the running module; generators that are passed to an operation are added to its own.
        mean: replace random numbers by their expectation (a dropout mask that keeps everything, the middle slope),
            so that an example meets the same numbers alone and in a batch. The model stays in training mode. Operations
            whose number of draws depends on values (`VALUE_DEPENDENT`) always get their expectation, and torch is
            seeded again after them.
        forced: a draw, and the number that all equal draws return instead of random numbers.
    """

    def __init__(self, runs: "Runs", mean: bool, forced: tuple[Draw, float] | None) -> None:
        super().__init__()
        self.taken: list[Draw] = []
        self._runs, self._mean, self._forced = runs, mean, forced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        by_hand = isinstance(given.get("generator"), torch.Generator)
        if by_hand:
            self._runs.generators.add(given["generator"])
        name = func.overloadpacket.__name__
        mean = self._mean or name in VALUE_DEPENDENT
        changed = {"dropout_p": 0.0} if "dropout_p" in names else _CHANGED.get(name, lambda _: {})(given)
        if mean and changed:
            given |= changed
            args = [given[n] for n in names[: len(args)]]
            kwargs = {n: given[n] for n in names[len(args) :] if n in given}
        made = func(*args, **kwargs)
        shapes = tuple(tuple(t.shape) for t in tree_leaves(made) if isinstance(t, Tensor))
        draw = Draw(name, self._runs.place(), shapes, by_hand, bool(changed) or name in _EXPECTED)
        self.taken.append(draw)
        if self._forced is not None and self._forced[0] == draw:
            made.fill_(self._forced[1])
        if mean and name in _EXPECTED:
            made.copy_(torch.as_tensor(_EXPECTED[name](given)))
        if name in VALUE_DEPENDENT and not self._mean:
            self._runs.generators.seed_torch(len(self.taken))
        return made


def _middle(given: dict[str, Any]) -> dict[str, float]:
    return dict.fromkeys(("lower", "upper"), (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2)


_CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "native_dropout": lambda given: {"p": 0.0},
    "rrelu_with_noise": _middle,
    "rrelu_with_noise_": _middle,
}
"""Operations that draw random numbers internally: the arguments that make them deterministic."""

VALUE_DEPENDENT = {
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
}
"""Operations whose number of draws depends on the values in their arguments. If one example is replaced, the random
numbers that are drawn after them are others, with the same distribution."""

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
"""Operations that return random numbers: their expectation, or at least a possible value."""


class Runs:
    """Forward passes of a model that always begin with the same random numbers: the generators are seeded."""

    def __init__(self, model: nn.Module, losses_of: LossesOf, generators: Generators) -> None:
        self.model, self.losses_of, self.generators = model, losses_of, generators
        self.autocasts = False
        """Whether a module has run under autocast."""
        self._open: list[str] = []

    def place(self) -> str:
        """The module that is running, in words; only inside `drawing`."""
        return self._open[-1] if self._open else OUTSIDE

    def losses(self, examples: Sequence[int]) -> Tensor:
        """`losses_of(examples)`, (n,), after seeding the generators; checked by `check_losses`."""
        self.generators.seed(0)
        losses = self.losses_of(examples)
        check_losses(losses, len(examples), traced=True)
        return losses

    @contextmanager
    def drawing(
        self, mean: bool = False, observe: Observe = lambda *_: None, forced: tuple[Draw, float] | None = None
    ) -> Iterator[Draws]:
        """Inside, modules are observed, and random numbers are recorded, or replaced (see `Draws`)."""
        self._open.clear()
        hooks = []
        for name, module in self.model.named_modules():
            label = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            enter, leave = partial(self._enter, label, observe), partial(self._leave, label, observe)
            hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
        try:
            with Draws(self, mean, forced) as draws:
                yield draws
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, label: str, observe: Observe, module: nn.Module, *given: Any) -> None:
        observe(f"the input of {label}", given)
        self._open.append(label)
        self.autocasts |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    def _leave(self, label: str, observe: Observe, module: nn.Module, given: Any, made: Any) -> None:
        observe(f"the output of {label}", made)
        self._open.pop()

    def first_difference(
        self, one: Sequence[int], other: Sequence[int], kept: Sequence[int], mean: bool = False
    ) -> str:
        """The first place where the kept rows of two batches differ in a forward pass, as a text in brackets; or ""."""
        before, after = (self._fingerprints(batch, kept, mean) for batch in (one, other))
        for (place, ours), (there, theirs) in zip(before, after, strict=False):
            pairs = [(x, y) for (shape, x), (same, y) in zip(ours, theirs, strict=False) if shape == same]
            if place != there or len(ours) != len(theirs) or any(moved_rows(*pair, 1e-4) for pair in pairs):
                return f" (first seen in {place})"
        return ""

    def _fingerprints(
        self, batch: Sequence[int], kept: Sequence[int], mean: bool
    ) -> list[tuple[str, list[tuple[tuple[float, ...], Tensor]]]]:
        """All module inputs and outputs, in the order of the calls, and the losses: for each tensor, its shape with the
        rows per example as first number, and fingerprints of the kept examples if that is a whole number."""
        taken: list[tuple[str, list[tuple[tuple[float, ...], Tensor]]]] = []

        def take(place: str, values: Any) -> None:
            found = []
            for leaf in tree_leaves(values):
                if isinstance(leaf, Tensor) and leaf.dim() and len(leaf):
                    rows, rest = divmod(len(leaf), len(batch))
                    own = torch.empty(0, 2) if rest else fingerprints(leaf.reshape(len(batch), -1), 0)[list(kept)]
                    found.append(((rows + rest / len(batch), *leaf.shape[1:]), own))
            taken.append((place, found))

        with self.drawing(mean, take):
            take("the losses", self.losses(batch))
        return taken


def fingerprints(x: Tensor, axis: int | None) -> Tensor:
    """A projection and the norm of each row, (rows, 2) float64 on the CPU; if axis is None, x is a single row."""
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
    """Indices of losses (n,) that differ by more than a relative tolerance; two non-finite losses count as equal."""
    before, after = before.detach().double().cpu(), after.detach().double().cpu()
    apart = (before - after).abs() > tolerance * after.abs().clamp_min(LEAST_LOSS)
    return (apart | (before.isfinite() != after.isfinite())).nonzero().flatten().tolist()
