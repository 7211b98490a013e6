"""Follows each microbatch through its forward and backward pass: which calls its layers make, and what they must do.

A pipeline runs forward passes of several microbatches before the first of them runs backward. Each is a `Pass` of its
own, and a backward pass reaches the groups of one of them only.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.clip_plan import SHARED, ClipPlan, Layout
from groupwise.clipping.factors import Factors
from groupwise.errors import UserError

Note = Callable[[str, int, Tensor, bool], Layout]
"""Called in a pass of the trace when a layer or parameter gets an input: its label, the number of the call, the input,
and whether that meets a parameter, or what was made of one, outside of a layer; returns where the batch is."""

NOT_NAMED: Hashable = object()
"""The microbatch of an ordinary forward pass, which its backward pass follows at once."""


class ClippedGradients:
    """The gradients of a model's trainable parameters, while a backward pass runs.

    Args:
        parameters: those that train, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[int, Tensor] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, .grad is None; afterwards it is what it was, and the sums that were added.

        Raises:
            UserError: autograd found a gradient for a parameter.
        """
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._sums[id(parameter)] = parameter.grad
                parameter.grad = None
        bypassed: list[str] = []
        try:
            yield
            bypassed = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        finally:
            for parameter in self._parameters.values():
                parameter.grad = self._sums.pop(id(parameter), None)
        if bypassed:
            refuse_bypass(bypassed[0])

    def add(self, parameter: Tensor, total: Tensor) -> None:
        """Add a clipped sum, of the parameter's shape."""
        known = self._sums.get(id(parameter))
        if known is not None:
            known.add_(total)
        elif total.stride() != parameter.stride() or total.dtype != parameter.dtype:
            self._sums[id(parameter)] = torch.empty_like(parameter).copy_(total)
        else:
            self._sums[id(parameter)] = total

    def check(self) -> None:
        """Refuse a parameter without a gradient, by name."""
        for name, parameter in self._parameters.items():
            if id(parameter) not in self._sums:
                raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")


def refuse_bypass(name: str) -> None:
    """Refuse a parameter that leads to the losses past its group, by name."""
    raise UserError(
        f"Parameter {name!r} is used outside its own layer's forward, where its gradient cannot be clipped: call the "
        "layer instead, or wrap the computation in a module that owns the parameter; for a penalty on weights use the "
        "optimizer's weight_decay."
    )


class Phase(Enum):
    """The work of a backward pass: all at once, only norms (ghost, first), only sums (second)."""

    CLIP = "clip"
    NORMS = "norms"
    SUMS = "sums"


class Pass:
    """A microbatch of B examples, forward and backward.

    Args:
        examples: B.
        passes: of the engine.
        note: tells where the layers' inputs hold the examples, in a pass of the trace; the plan does in all others.
    """

    def __init__(self, examples: int, passes: "Passes", note: Note | None = None) -> None:
        self.examples, self.passes, self.traces = examples, passes, note is not None
        self.groups: dict[int, Any] = {}
        """The `GroupPass` of each group of which a layer has run, by its index."""
        self.ended = False
        """Whether the forward pass has: what runs now runs once more, inside the backward pass (checkpointing)."""
        self.phase: Phase | None = None
        """What the backward pass is for, while it runs."""
        self.factors: Factors | None = None
        """In a backward pass for sums, by what rows are multiplied, or None."""
        self.squared_norms: dict[int, Tensor] = {}
        self.closed: set[int] = set()
        self.reported: set[str] = set()
        """Layers that returned their gradients themselves."""
        self.recomputes = False
        """Whether a checkpoint has computed something once more, inside the backward pass."""
        self.squared_norms_again: dict[int, Tensor] = {}
        """In a backward pass for sums that recomputes: the norms of what it adds up."""
        self._plan, self._note = passes.plan, note
        self._counts: dict[str, int] = {}

    def find(self, label: str, x: Tensor, meets: bool = False) -> Layout:
        """Where the input x of the next call of a layer or parameter holds the batch.

        Args:
            label: of the layer or parameter.
            x: its input.
            meets: x meets a parameter, or what was made of one, outside of a layer.

        Raises:
            UntracedCall: the plan does not know the call.
            UserError: x is nested or sparse; a call that runs once more is another one.
        """
        if x.is_nested or x.layout is not torch.strided:
            kind, remedy = "sparse", "make it dense (to_dense)"
            if x.is_nested:
                kind, remedy = "nested", "pad them to the longest (torch.nested.to_padded_tensor), and give a mask"
            raise UserError(f"{label} got a {kind} tensor, whose examples cannot be distinguished: {remedy}.")
        if self.examples == 1 and not self.traces:  # all rows are the one example's
            return SHARED if x.dim() == 0 else Layout(0, len(x))
        if self.ended:
            return self._plan.find_again(label, x, self.examples)
        nth = self._counts.get(label, 0)
        self._counts[label] = nth + 1
        if self._note is not None:
            return self._note(label, nth, x, meets)
        return self._plan.find(label, nth, x, self.examples)

    def begin_sums(self, squares: Tensor, factors: Factors) -> None:
        """After a backward pass for norms, the same again for sums, so that it rounds as the first."""
        self.phase, self.factors, self.squared_norms = Phase.SUMS, factors, {0: squares}
        self.reported.clear()

    def check_again(self) -> None:
        """Refuse a pass for sums that has other norms than the pass for norms, which bounds nothing then.

        Masks that a checkpoint draws again in between are such a case: with `preserve_rng_state=False`, or from a
        generator of one's own.

        Raises:
            UserError: they differ by more than rounding.
        """
        for k, again in self.squared_norms_again.items():
            first = self.squared_norms.get(k, again)  # of a pass on its own there are none
            if bool(((again - first).abs() > 2e-3 * first.abs()).any()):
                raise UserError(
                    "Activation checkpointing gave other numbers in the second backward pass of ghost clipping than in "
                    "the first, whose norms bound nothing then: let it keep torch's random state (preserve_rng_state), "
                    "draw from torch's own generator, or clip flat."
                )

    def end(self) -> None:
        """It is over: let go of all that leads back to the graph, which leads to it."""
        for group_pass in self.groups.values():
            group_pass.release()
        self.groups.clear()


class Passes:
    """The passes of one engine: the one that runs, and those that wait for their backward pass.

    Args:
        gradients: of the model's parameters, to which the clipped sums are added.
    """

    def __init__(self, gradients: ClippedGradients) -> None:
        self.gradients, self.plan = gradients, ClipPlan()
        self.running: Pass | None = None
        self._waiting: dict[Hashable, Pass] = {}

    @property
    def current(self) -> Pass:
        """The one that runs."""
        assert self.running is not None, "layers run as they are outside of the engine's passes"
        return self.running

    @contextmanager
    def forward(self, examples: int, microbatch: Hashable = NOT_NAMED, note: Note | None = None) -> Iterator[None]:
        """What runs inside is a forward pass of B examples; a named one waits for `backward(…, microbatch)`, and one
        without a name until the next forward pass. One that fails is forgotten.

        Raises:
            UserError: inside of another pass.
        """
        if self.running is not None:
            raise UserError("A forward pass was begun inside another pass of the engine: leave that first.")
        self._end(NOT_NAMED)
        begun = self.running = Pass(examples, self, note)
        try:
            yield
        except BaseException:
            begun.end()
            raise
        finally:
            begun.ended, self.running = True, None
        if note is not None:
            begun.end()
        elif begun.groups or microbatch is NOT_NAMED:  # else gradients were off
            self._waiting[microbatch] = begun

    @contextmanager
    def backward(self, phase: Phase, microbatch: Hashable = NOT_NAMED) -> Iterator[Pass]:
        """Inside, the groups of a microbatch (or of the last forward pass) take part; afterwards its pass is over.

        Raises:
            UserError: inside another one; no forward pass of that name waits.
        """
        outer = self.running
        if outer is not None and outer.phase is not None:
            raise UserError("A backward pass was begun inside another one: end that first, they share one set of sums.")
        found = self._waiting.pop(microbatch, None)
        if found is None:
            of = "" if microbatch is NOT_NAMED else f" of microbatch {microbatch!r}"
            raise UserError(
                f"No forward pass{of} waits for this backward pass: run the model with gradients on inside "
                "engine.forward(examples), or forward(examples, microbatch), once for each backward pass."
            )
        found.phase, self.running = phase, found
        try:
            yield found
        finally:
            found.phase, self.running = None, outer
            found.end()  # also after an error: a probe's node holds the passes that hold it

    def forget(self) -> None:
        """Drop the microbatches that wait."""
        for microbatch in list(self._waiting):
            self._end(microbatch)

    def _end(self, microbatch: Hashable) -> None:
        if (waiting := self._waiting.pop(microbatch, None)) is not None:
            waiting.end()
