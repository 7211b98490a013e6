"""Watches which random numbers a forward pass draws, in which module, and from which generators.

Inside `Draws` every random operation of torch is noted, or gives its expectation instead. `ModuleCalls` knows the
module whose code runs.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.clipping.unchanged import Generators

Border = Callable[[str, Any], None]
"""Called when a forward pass enters a module ("the input of ...", arguments) or leaves it ("the output of ...")."""

OUTSIDE = "the loss, outside of the model's modules"


class ModuleCalls:
    """The modules that the forward pass is in; inside `followed` only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[str] = []

    @property
    def innermost(self) -> str:
        """The module whose code runs, in words."""
        return self._open[-1] if self._open else OUTSIDE

    @property
    def inside(self) -> bool:
        """Whether any module's code runs."""
        return bool(self._open)

    @contextmanager
    def followed(self, border: Border | None = None) -> Iterator[None]:
        """Inside, modules that are called are known, and `border` hears of each that is entered or left."""
        self._open.clear()
        hooks = []
        for name, module in self._model.named_modules():
            label = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            hooks.append(
                module.register_forward_pre_hook(partial(self._enter, label, border), prepend=True, with_kwargs=True)
            )
            hooks.append(module.register_forward_hook(partial(self._leave, label, border)))
        try:
            yield
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


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """One random operation: its name in torch, where it ran, the shapes of what it gave."""

    name: str
    place: str
    shapes: tuple[Shape, ...]
    by_hand: bool = False
    """Whether the operation was given a generator."""


class Draws(TorchDispatchMode):
    """Inside, random operations of torch are noted.

    Args:
        calls: tells the module that runs.
        generators: to which those that an operation is given by hand are added.
        calm: give the expectation instead of random numbers (a dropout mask that keeps all, a slope in the middle), so
            that an example meets the same numbers alone as among others. The model stays in training mode. If names of
            operations are given, only what these draw, and what follows them does not depend on how often they drew.
        forced: a draw, and the number that it and its like give instead of random ones.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        generators: Generators,
        calm: bool | Collection[str] = False,
        forced: tuple[Draw, float] | None = None,
    ) -> None:
        super().__init__()
        self.taken: list[Draw] = []
        self.uncalmed: list[Draw] = []
        """Those whose expectation is not known here; with `calm` only."""
        self._calls, self._generators, self._calm, self._forced = calls, generators, calm, forced

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
        calm = self._calm is True or (self._calm and name in self._calm)
        if calm and (change := _CHANGED.get(name) or ("dropout_p" in given and {"dropout_p": _nothing})):
            given = given | {key: make(given) for key, make in change.items()}
            args, kwargs = _as_before(names, given, len(args))
        made = func(*args, **kwargs)
        shapes = tuple(tuple(t.shape) for t in tree_leaves(made) if isinstance(t, Tensor))
        draw = Draw(name, self._calls.innermost, shapes, by_hand)
        self.taken.append(draw)
        if self._forced is not None and self._forced[0] == draw and isinstance(made, Tensor):
            made.fill_(self._forced[1])
        if calm and self._calm is not True:
            self._generators.seed(len(self.taken))
        if calm and not (name in _CHANGED or "dropout_p" in given):
            if name in _EXPECTED and isinstance(made, Tensor):
                expected = _EXPECTED[name](given)
                made.copy_(expected) if isinstance(expected, Tensor) else made.fill_(expected)
            else:
                self.uncalmed.append(draw)
        return made


def shared_draws(some: Sequence[Draw], twice: Sequence[Draw]) -> Iterator[Draw]:
    """The draws that examples share, from a forward pass and another one with every row there twice.

    What each example draws for itself has an axis that grows with the rows, or is drawn once an example. A permutation
    of the rows is one draw for all of them.
    """
    kinds: dict[tuple[str, str], None] = {(draw.place, draw.name): None for draw in (*some, *twice)}
    for kind in kinds:
        ours, theirs = ([draw for draw in draws if (draw.place, draw.name) == kind] for draws in (some, twice))
        if len(theirs) == 2 * len(ours) and sorted(d.shapes for d in ours * 2) == sorted(d.shapes for d in theirs):
            continue
        if len(ours) != len(theirs):
            yield (ours or theirs)[0]
            continue
        for one, two in zip(ours, theirs, strict=True):
            own = one.name != "randperm" and any(map(_doubled, one.shapes, two.shapes))
            if not own and not _is_seed(one):
                yield one


def _doubled(one: Shape, two: Shape) -> bool:
    """One axis is twice as long, the others are equal."""
    differ = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
    return len(one) == len(two) and len(differ) == 1 and differ[0][1] == 2 * differ[0][0]


def _is_seed(draw: Draw) -> bool:
    """Whole numbers that torch's DataLoader draws for its workers, whatever the batch."""
    return draw.place == OUTSIDE and draw.name == "random_" and draw.shapes == ((),)


def _as_before(names: Sequence[str], given: dict[str, Any], positional: int) -> tuple[list[Any], dict[str, Any]]:
    """The same call again: its first arguments by position, the others by name."""
    return [given[name] for name in names[:positional]], {n: given[n] for n in names[positional:] if n in given}


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
