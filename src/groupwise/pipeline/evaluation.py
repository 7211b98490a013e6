"""Evaluates a model in stages: forward passes without gradients, and beam search.

All stages run the search of transformers. In each forward pass they run one after the other, and the last one sends the
scores to all.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.pipeline.stage import Stage
from groupwise.tasks.beam_search import generate
from groupwise.tasks.text_generation import TextGeneration
from groupwise.torchvision_import import import_torchvision_first
from groupwise.training.task import Microbatch, Split, eval_mode

import_torchvision_first()  # before transformers, whose import would fail
from transformers import DynamicCache, GenerationMixin, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402


class StageLink:
    """Sends and receives between stages; all processes of the pipeline make the same calls in the same order.

    `group` has the processes of the pipeline, in the order of the stages; None takes all.
    """

    def __init__(self, stage: Stage, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.stage, self.device, self._group = stage, device, group

    def through(self, first: Tensor, **kwargs: Any) -> Tensor | None:
        """One forward pass: receive from the stage before, run `stage.hidden`, send to the stage after.

        Args:
            first: the input of the first stage, on this device; other stages only use its shape.

        Returns:
            The hidden activations on the last stage; None on the others.
        """
        stage = self.stage
        if not stage.first:
            shape = stage.activation(len(first), first.shape[-1])
            first = torch.empty(shape, dtype=stage.dtype, device=self.device)
            dist.recv(first, group=self._group, group_src=stage.index - 1)
        hidden = stage.hidden(first, **kwargs)
        if stage.last:
            return hidden
        dist.send(hidden, group=self._group, group_dst=stage.index + 1)
        return None

    def copy_(self, tensor: Tensor) -> None:
        """Copy the last stage's values to all stages, in place."""
        dist.broadcast(tensor, group=self._group, group_src=self.stage.count - 1)

    def broadcast(self, value: Any) -> Any:
        """Broadcast a small object from the last stage."""
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=self.stage.count - 1, device=self.device)
        return values[0]


def evaluate_pipeline(
    task: TextGeneration, link: StageLink, split: Split, batch_size: int, limit: int | None = None, final: bool = False
) -> dict[str, float]:
    """The metrics that the task's `evaluate` would give for the whole model; all processes call this and get them.

    The task's model is not used. A final evaluation also stores the generated texts in the task's `outputs`.
    """
    feed = task.feed(split, link.device)
    rows = feed.order(np.arange(min(limit or len(feed), len(feed))))
    parts = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    outcomes = evaluate_outcomes(link, (feed.microbatches(part, len(part))[0] for part in parts))
    write = partial(generate, Searcher(link), device=link.device) if final else None
    return task.metrics(split, rows, outcomes, write)


def evaluate_outcomes(link: StageLink, microbatches: Iterable[Microbatch]) -> Tensor:
    """The losses of all examples, (n,), on every process, on the CPU, in order and without padding examples.

    Microbatches may differ in shape. A stage starts the next one as soon as it has sent the current one on.
    """
    stage, found = link.stage, []
    with eval_mode(stage), torch.no_grad():
        for microbatch in microbatches:
            reads: dict[str, Any] = {name: microbatch.kwargs[name] for name in stage.reads if name in microbatch.kwargs}
            hidden = link.through(microbatch.first, **reads)
            if hidden is not None:
                found.append(stage.losses(hidden, microbatch.kwargs)[: microbatch.examples - microbatch.absent].cpu())
    return link.broadcast(torch.cat(found) if stage.last else None)


class Searcher(PreTrainedModel, GenerationMixin):
    """A causal language model whose forward pass runs through all stages.

    All processes get the same scores, so they choose the same tokens. Each has the key-value cache of its own blocks.
    """

    def __init__(self, link: StageLink) -> None:
        stage: Any = link.stage
        config = copy.deepcopy(stage.config)
        config._attn_implementation = "eager"  # transformers would check that this class has another one
        super().__init__(config)
        self.stage, self._link = stage, link

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        of_transformers: Any = super()
        return of_transformers.generate(*args, past_key_values=DynamicCache(config=self.stage.config), **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> Any:
        """Scores of the next token after the last `logits_to_keep` tokens, (b, logits_to_keep, V); 0 keeps all."""
        hidden = self._link.through(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids.expand_as(input_ids),
            past_key_values=past_key_values,
            use_cache=True,
        )
        if hidden is None:
            shape = (len(input_ids), logits_to_keep or input_ids.shape[1], self.config.vocab_size)
            dtype = torch.promote_types(self.stage.dtype, torch.float32)
            logits = torch.empty(shape, dtype=dtype, device=self._link.device)
        else:
            logits = self.stage.logits(hidden[:, -logits_to_keep:]).contiguous()
        self._link.copy_(logits)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
