"""Keeps the state of each microbatch during its forward and backward pass.

A pipeline runs the forward passes of several microbatches before the first backward pass. Each microbatch has its own
`Pass`, and a backward pass belongs to exactly one of them.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from groupwise.clipping.clip_plan import SHARED, ClipPlan, Layout
from groupwise.clipping.factors import Factors
from groupwise.errors import UserError

Note = Callable[[str, int, Tensor, bool], Layout]
"""During a trace, called for each input of a layer or parameter: its label, the number of the call, the input, and
whether the input is combined with a parameter (or a tensor computed from one) outside a layer. Returns the layout."""

UNNAMED: Hashable = object()
"""The microbatch of an ordinary forward pass, whose backward pass follows directly."""


class ClippedGradients:
    """Collects the clipped sums of trainable parameters, which are given by name, during a backward pass."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[int, Tensor] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, .grad is None; afterwards it is its earlier value plus the clipped sums. Raises a `UserError` if
        autograd itself set a parameter's .grad, as that gradient bypassed clipping."""
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
        """Raise a `UserError` that names a parameter without a gradient."""
        for name, parameter in self._parameters.items():
            if id(parameter) not in self._sums:
                raise UserError(
                    f"Parameter {name!r} is trainable but got no gradient: freeze it, or use it in every forward pass "
                    "(multiplied by 0, if it should have no effect)."
                )


def refuse_bypass(name: str) -> None:
    """Raise a `UserError` that names a parameter whose gradient bypasses its group."""
    raise UserError(
        f"Parameter {name!r} is used outside its own layer's forward, where its gradient cannot be clipped: call the "
        "layer instead, or wrap the computation in a module that owns the parameter (as an attribute or in a "
        "ParameterList, not in a list); for a penalty on weights use the optimizer's weight_decay."
    )


Phase = Literal["clip", "norms", "sums"]
"""The work of a backward pass: norms and sums, norms alone (ghost, first pass), or sums alone (second)."""


class Pass:
    """The forward and backward pass of a microbatch of B examples.

    In a pass of the trace `note` records each input and returns its layout; otherwise the plan gives the layout.
    """

    def __init__(self, examples: int, passes: "Passes", plan: ClipPlan, note: Note | None = None) -> None:
        self.examples, self.passes, self.traces = examples, passes, note is not None
        self.groups: dict[int, Any] = {}
        """The `GroupPass` of each group, by index, once one of its layers has run."""
        self.ended = False
        """Whether the forward pass has ended. A layer that runs after that is recomputed (activation checkpointing)."""
        self.phase: Phase | None = None
        """What the backward pass computes, while it runs; else None."""
        self.factors: Factors | None = None
        """The factors of the rows in a backward pass for sums; None: all 1."""
        self.squared_norms: dict[int, Tensor] = {}
        self.reported: set[str] = set()
        """Layers that returned their clipped sums to autograd (`direct`)."""
        self.recomputes = False
        """Whether activation checkpointing has run a layer again."""
        self.squared_norms_again: dict[int, Tensor] = {}
        """In a backward pass for sums that recomputes layers: the norms of the gradients that it adds up."""
        self._plan, self._note = plan, note
        self._counts: dict[str, int] = {}
        self._found: dict[tuple[str, tuple[int, ...]], set[Layout]] = {}
        """The layouts of the forward pass, by label and shape of the input."""

    def find(self, label: str, x: Tensor, meets: bool = False) -> Layout:
        """The layout of the input x of the next call of a layer or parameter; the arguments are those of `Note`.

        Raises:
            UntracedCall: the call is not in the plan.
            UserError: x is nested or sparse; a recomputed call has no match in the forward pass.
        """
        if x.is_nested or x.layout is not torch.strided:
            kind, remedy = "sparse", "make it dense (to_dense)"
            if x.is_nested:
                kind, remedy = "nested", "pad them to the longest (torch.nested.to_padded_tensor), and give a mask"
            raise UserError(f"{label} got a {kind} tensor, whose examples cannot be distinguished: {remedy}.")
        if self.examples == 1 and not self.traces:  # all rows belong to the one example
            return SHARED if x.dim() == 0 else Layout(0, len(x))
        known = self._found.setdefault((label, tuple(x.shape)), set())
        if self.ended:
            if len(known) != 1:
                raise UserError(
                    f"{label} runs inside the backward pass on a tensor of shape {tuple(x.shape)}, which it did not "
                    "get in the forward pass, or got with the batch on several axes: use checkpointing with "
                    "use_reentrant=False, around this layer alone or not at all."
                )
            return next(iter(known))
        nth = self._counts.get(label, 0)
        self._counts[label] = nth + 1
        if self._note is not None:
            return self._note(label, nth, x, meets)
        layout = self._plan.find(label, nth, x, self.examples)
        known.add(layout)
        return layout

    def begin_sums(self, factors: Factors) -> None:
        """Go from the backward pass for norms to the one for sums."""
        self.phase, self.factors = "sums", factors
        self.reported.clear()
        for group_pass in self.groups.values():
            group_pass.over = group_pass.received = False
            group_pass.waiting = group_pass.calls

    def check_again(self) -> None:
        """Raise a `UserError` if the norms of the pass for sums differ by more than rounding from those of the pass for
        norms, which set the clip factors: activation checkpointing may draw other dropout masks in the second pass."""
        for k, again in self.squared_norms_again.items():
            first = self.squared_norms.get(k)  # `sums_of` has no first pass
            if first is not None and bool(((again - first).abs() > 2e-3 * first.abs()).any()):
                raise UserError(
                    "Activation checkpointing computed other values in the second backward pass of ghost clipping than "
                    "in the first, so the norms of the first do not bound them: let it keep torch's random state "
                    "(preserve_rng_state), draw from torch's own generator, or use clip=flat."
                )

    def end(self) -> None:
        """Finish: break the reference cycles with the autograd graph, so that its memory is freed."""
        for group_pass in self.groups.values():
            if not group_pass.over:
                group_pass.release()
        self.groups.clear()


class Passes:
    """The passes of one engine: the current one, and those whose backward pass is pending."""

    def __init__(self, gradients: ClippedGradients, device: torch.device) -> None:
        self.gradients = gradients
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """An input of every call, which gets no gradient. With it autograd runs each call's backward."""
        self.running: Pass | None = None
        self._waiting: dict[Hashable, Pass] = {}

    @property
    def current(self) -> Pass:
        """The pass that is running."""
        assert self.running is not None, "layers are not patched outside of the engine's passes"
        return self.running

    @contextmanager
    def forward(
        self, examples: int, plan: ClipPlan, microbatch: Hashable = UNNAMED, note: Note | None = None
    ) -> Iterator[None]:
        """Run a forward pass of B examples inside, but not inside another pass. A named one stays pending until
        `backward(…, microbatch)`, an unnamed one until the next forward pass. One that raises is dropped."""
        if self.running is not None:
            raise UserError("A forward pass was begun inside another pass of the engine: end that one first.")
        if UNNAMED in self._waiting:
            self._waiting.pop(UNNAMED).end()
        begun = self.running = Pass(examples, self, plan, note)
        try:
            yield
        except BaseException:
            begun.end()
            raise
        finally:
            begun.ended, self.running = True, None
        if note is not None:
            begun.end()
        elif begun.groups or microbatch is UNNAMED:  # else gradients were disabled
            self._waiting[microbatch] = begun

    @contextmanager
    def backward(self, phase: Phase, microbatch: Hashable = UNNAMED) -> Iterator[Pass]:
        """Run the backward pass of a microbatch (or of the last forward pass) inside, and finish its pass. Raises a
        `UserError` inside another backward pass, or if no forward pass of that name is pending."""
        outer = self.running
        if outer is not None and outer.phase is not None:
            raise UserError("A backward pass was begun inside another one: end that first, as both add to .grad.")
        found = self._waiting.pop(microbatch, None)
        if found is None:
            of = "" if microbatch is UNNAMED else f" of microbatch {microbatch!r}"
            raise UserError(
                f"No forward pass{of} waits for this backward pass: run the model with gradients enabled inside "
                "engine.forward(examples), or forward(examples, microbatch), once for each backward pass."
            )
        found.phase, self.running = phase, found
        try:
            yield found
        finally:
            found.phase, self.running = None, outer
            found.end()  # after an error too: autograd's nodes and the pass refer to each other

    def forget(self) -> None:
        """Drop the pending microbatches."""
        while self._waiting:
            self._waiting.popitem()[1].end()
