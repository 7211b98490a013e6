"""Runs a few examples through a model, with its engine or without, on the same random numbers each time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from groupwise.clipping.checks import check_losses
from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.randomness import Border, Draw, Draws, ModuleCalls
from groupwise.clipping.unchanged import Generators

Losses = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one batch of n examples gave."""

    losses: Tensor
    """(n,)"""
    norms: Tensor
    """‖g_k^(i)‖, (K, n); (0, n) without the engine."""
    counts: Tensor
    """(K,)"""
    draws: list[Draw] = field(repr=False)


class Runs:
    """Forward and backward passes of an attached model that always begin with the same random numbers.

    Args:
        engine: the attached engine.
        losses_of: indices of examples -> their losses, (n,).
    """

    def __init__(self, engine: ClippingEngine, losses_of: Losses) -> None:
        self.engine, self.model = engine, engine.model
        self._losses_of = losses_of
        self.calls = ModuleCalls(engine.model)
        self.generators = Generators({p.device for p in engine.model.parameters()})
        self.uncalmed = False
        """Whether a draw of unknown expectation was met: an example cannot get alone what it gets in a batch."""

    def losses(self, examples: Sequence[int]) -> Tensor:
        """As `losses_of`, (n,).

        Raises:
            UserError: they are not one number for each example.
        """
        losses = self._losses_of(examples)
        check_losses(losses, len(examples), traced=True)
        return losses

    @contextmanager
    def drawing(
        self, calm: bool = False, border: Border | None = None, forced: tuple[Draw, float] | None = None
    ) -> Iterator[Draws]:
        """Inside, draws are noted (or calmed, or one of them forced) and modules followed."""
        with self.calls.followed(border), Draws(self.calls, self.generators, calm, forced) as draws:
            yield draws
        self.uncalmed = self.uncalmed or bool(draws.uncalmed)

    def plain(self, examples: Sequence[int], calm: bool = False, border: Border | None = None) -> Outcome:
        """The model as if no engine were attached, forward only (with gradients on: kernels may depend on it)."""
        self.generators.seed(0)
        with self.drawing(calm, border) as draws:
            losses = self.losses(examples).detach()
        return Outcome(losses, losses.new_zeros(0, len(examples)), losses.new_zeros(0), draws.taken)

    def clipped(self, examples: Sequence[int], calm: bool = False) -> Outcome:
        """The engine's forward and backward pass; clipped sums are added to .grad."""
        engine, before = self.engine, self.engine.counts
        known = None
        while known != engine.plan:  # a pass that was interrupted to trace an unknown call has drawn more
            known = engine.plan
            self.generators.seed(0)
            with self.drawing(calm) as draws:
                losses = engine.losses(self.losses, examples)
                if known == engine.plan:
                    engine.backward(losses)
        return Outcome(losses.detach(), engine.per_example_norms.cpu(), engine.counts - before, draws.taken)

    def calm(self) -> Draws:
        """Inside, draws are calmed, those of backward passes too."""
        return Draws(self.calls, self.generators, calm=True)

    def alone(self, example: int) -> Tensor:
        """One example's loss without any other and without the engine, a scalar with its graph; draws are calmed."""
        self.generators.seed(0)
        with self.drawing(calm=True):
            return self.losses([example])[0]

    def among(self, examples: Sequence[int], example: int) -> Tensor:
        """One example's loss in its batch, without the engine: where it cannot meet alone what it draws there."""
        self.generators.seed(0)
        with self.drawing(calm=True):
            return self.losses(examples)[list(examples).index(example)]

    def clear(self) -> None:
        """Parameters have no gradient."""
        for parameter in self.model.parameters():
            parameter.grad = None
