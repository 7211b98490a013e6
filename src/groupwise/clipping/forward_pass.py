"""Looks the calls of one forward pass up in the plan, in their order."""

from collections.abc import Callable

from torch import Tensor

from groupwise.clipping.clip_plan import ClipPlan
from groupwise.clipping.layouts import SHARED, Layout
from groupwise.errors import UserError

Note = Callable[[str, int, Tensor, bool], Layout]
"""Called in a pass of the trace when a layer or parameter gets an input: its label, the number of the call, the input,
and whether that meets a parameter, or what was made of one, outside of a layer; returns where the batch is."""


class ForwardPass:
    """One forward pass of B examples: looks its calls up in the plan, in their order.

    Args:
        examples: B.
        plan: where the layers' inputs hold the examples.
        note: tells it instead, in a pass of the trace.
    """

    def __init__(self, examples: int, plan: ClipPlan, note: Note | None = None) -> None:
        self.examples, self._note = examples, note
        self.traces = note is not None
        self._plan = plan
        self._counts: dict[str, int] = {}
        self.ended = False
        """Whether what runs now runs once more, inside the backward pass (checkpointing)."""

    def find(self, label: str, x: Tensor, meets: bool) -> Layout:
        """Where the input x of the next call of a layer or parameter holds the batch.

        Raises:
            UntracedCall: the plan does not know the call.
        """
        if self.examples == 1 and not self.traces:  # all rows are the one example's
            return SHARED if x.dim() == 0 else Layout(0, len(x))
        if self.ended:
            return self._again(label, x)
        nth = self._counts.get(label, 0)
        self._counts[label] = nth + 1
        if self._note is not None:
            return self._note(label, nth, x, meets)
        return self._plan.find(label, nth, x, self.examples)

    def _again(self, label: str, x: Tensor) -> Layout:
        layout = self._plan.find_again(label, x, self.examples)
        if layout is None:
            raise UserError(
                f"{label} runs inside the backward pass on a tensor of shape {tuple(x.shape)}, which it did not get in "
                "the forward pass, or got with the batch on several axes: use checkpointing with use_reentrant=False, "
                "around this layer alone or not at all."
            )
        return layout
