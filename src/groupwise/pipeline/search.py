"""The whole model as transformers' `generate` sees it, on the last stage of a pipeline."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from groupwise.data.torchvision_compat import import_torchvision
from groupwise.pipeline.decoding import Pass, announce
from groupwise.pipeline.line import Line

import_torchvision()  # before transformers, which falls without it
from transformers import DynamicCache, GenerationMixin, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402


class Keys(DynamicCache):
    """The last stage's own keys and values, which tell the search how long the rows are."""

    reordered: Tensor | None = None
    """Which row each row goes on from since the last pass, (b,)."""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder what is here, and keep the order for the other stages."""
        super().reorder_cache(beam_idx)
        self.reordered = beam_idx


class Searcher(PreTrainedModel, GenerationMixin):
    """A causal language model whose forward pass is that of all stages.

    Args:
        line: of the last stage.
    """

    def __init__(self, line: Line) -> None:
        stage: Any = line.stage
        config = copy.deepcopy(stage.config)
        config._attn_implementation = "eager"  # transformers asks whether it can do the stage's own, and it has none
        super().__init__(config)
        self.stage, self._line = stage, line

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        of_transformers: Any = super()
        return of_transformers.generate(*args, past_key_values=Keys(config=self.stage.config), **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Keys,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> Any:
        """Scores of the next token after the last `logits_to_keep` tokens, (b, logits_to_keep, V); 0 keeps all."""
        order, past_key_values.reordered = past_key_values.reordered, None
        fresh = past_key_values.get_seq_length() == 0
        one = Pass(input_ids, position_ids.expand_as(input_ids), attention_mask, order, fresh)
        announce(self._line, one)
        hidden = one.run(self._line, past_key_values)
        assert hidden is not None, "the search is on the last stage"
        logits = self.stage.logits(hidden[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
