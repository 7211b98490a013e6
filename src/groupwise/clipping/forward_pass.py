"""Looks the calls of one forward pass up in the plan, in their order."""

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import ClipPlan
from groupwise.clipping.layouts import SHARED, Layout
from groupwise.clipping.trace import Recorder
from groupwise.errors import UserError


class ForwardPass:
    """One forward pass of B examples: looks its calls up in the plan, in their order.

    Args:
        examples: B.
        plan: where the layers' inputs hold the examples.
        recorder: notes the calls instead, in a pass of the trace.
    """

    def __init__(self, examples: int, plan: ClipPlan, recorder: Recorder | None = None) -> None:
        self.examples, self.recorder = examples, recorder
        self._plan = plan
        self._counts: dict[str, int] = {}
        self._seen: dict[tuple[str, torch.Size], Layout] = {}
        self.ended = False
        """Whether what runs now runs once more, inside the backward pass (checkpointing)."""

    def find(self, label: str, x: Tensor, meets: bool) -> Layout:
        """Where the input x of the next call of a layer or parameter holds the batch.

        Raises:
            UntracedCall: the plan does not know the call.
        """
        if self.examples == 1 and self.recorder is None:  # all rows are the one example's
            return SHARED if x.dim() == 0 else Layout(0, len(x))
        if self.ended:
            return self._again(label, x)
        nth = self._counts.get(label, 0)
        self._counts[label] = nth + 1
        if self.recorder is not None:
            return self.recorder.note(label, nth, x, meets)
        layout = self._plan.find(label, nth, x, self.examples)
        if self._seen.setdefault((label, x.shape), layout) != layout:
            self._seen[label, x.shape] = TWO
        return layout

    def _again(self, label: str, x: Tensor) -> Layout:
        layout = self._seen.get((label, x.shape))
        if layout is None or layout is TWO:
            raise UserError(
                f"{label} runs inside the backward pass on a tensor of shape {tuple(x.shape)}, which it did not get in "
                "the forward pass, or got with the batch on several axes: use checkpointing with use_reentrant=False, "
                "around this layer alone or not at all."
            )
        return layout


TWO = Layout(axis=-1)
"""Of calls of one layer, alike in shape, that hold the batch in two ways."""
