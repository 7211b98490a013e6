"""Notes which random numbers a forward pass draws, in which module, or gives their expectation instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.clipping.unchanged import Generators


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
        changed = _CHANGED.get(name) or ({"dropout_p": _nothing} if "dropout_p" in given else {})
        if calm and changed:
            given |= {key: make(given) for key, make in changed.items()}
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


def _nothing(given: dict[str, Any]) -> float:
    return 0.0


def _middle(given: dict[str, Any]) -> float:
    return float((given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2)


_CHANGED: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {
    "native_dropout": {"p": _nothing},
    "rrelu_with_noise": {"lower": _middle, "upper": _middle},
    "rrelu_with_noise_": {"lower": _middle, "upper": _middle},
}
"""Operations that draw inside and give something else: the argument that takes the chance out."""

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
}
"""Operations that give random numbers: what they give on average, or at least always."""
