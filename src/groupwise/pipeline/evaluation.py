"""Evaluates a model in stages: forward passes one after the other, without gradients, and beam search over them.

The search is transformers', on the last stage. For each forward pass that it makes, the last stage tells all stages the
new tokens and how the rows were reordered; then the stages run one after the other, each with its own blocks' keys and
values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.config.schema import GenerateConfig
from groupwise.errors import UserError
from groupwise.pipeline.stage import Stage
from groupwise.tasks.beam_search import generate
from groupwise.torchvision_import import mend_torchvision
from groupwise.training.task import Feed, Microbatch, Split, eval_mode

mend_torchvision()  # before transformers, which falls without it
from transformers import DynamicCache, GenerationMixin, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402


class StageLink:
    """One process's link to the other stages; all processes of the pipeline make the same calls in the same order.

    With one stage nothing is sent, and no process group is asked.

    Args:
        stage: the piece of the model that this process hosts.
        device: of this process.
        group: the processes of the pipeline, in the order of the stages; None takes all.
    """

    def __init__(self, stage: Stage, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.stage, self.device, self._group = stage, device, group

    def through(self, first: Tensor, **kwargs: Any) -> Tensor | None:
        """One forward pass: take from the stage before, run `stage.hidden`, give to the stage after.

        Args:
            first: what the first stage reads, on this device; the others need its shape alone.
            kwargs: what `stage.hidden` takes.

        Returns:
            On the last stage its hidden activations; None on the others.
        """
        stage = self.stage
        if not stage.first:
            shape = stage.activation(len(first), first.shape[-1], before=True)
            first = torch.empty(shape, dtype=stage.dtype, device=self.device)
            dist.recv(first, group=self._group, group_src=stage.index - 1)
        hidden = stage.hidden(first, **kwargs)
        if stage.last:
            return hidden
        dist.send(hidden, group=self._group, group_dst=stage.index + 1)
        return None

    def broadcast_(self, numbers: Tensor) -> Tensor:
        """The last stage's tensor to all, in place; the others pass one of its shape and type."""
        if self.stage.count > 1:
            dist.broadcast(numbers, group=self._group, group_src=self.stage.count - 1)
        return numbers

    def broadcast(self, value: Any) -> Any:
        """What the last stage passed in, to all; for small things, seldom."""
        values = [value]
        if self.stage.count > 1:
            dist.broadcast_object_list(values, group=self._group, group_src=self.stage.count - 1, device=self.device)
        return values[0]


@runtime_checkable
class Staged(Protocol):
    """A task whose model can be in stages: `tasks.TextGeneration` and `tasks.ImageClassification`."""

    def feed(self, split: Split, device: torch.device) -> Feed:
        """Makes the microbatches of a split."""

    def metrics(
        self, split: Split, rows: np.ndarray, outcomes: Tensor, write: Callable[..., list[str]] | None = None
    ) -> dict[str, float]:
        """Metrics from `Stage.outcomes` of these rows (n,) of a split, (n, ...); a final evaluation writes texts."""


def evaluate_pipeline(
    task: Staged,
    stage: Stage,
    split: Split,
    batch_size: int,
    limit: int | None = None,
    final: bool = False,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """What the task's `evaluate` returns with the whole model; every process calls it alike and gets the metrics.

    A final evaluation leaves the texts in the task's `outputs`, also on every process.

    Args:
        task: for its data and its metrics; its own model is not asked.
        stage: the piece of the model that this process hosts.
        split, batch_size, limit, final: as `evaluate` takes them.
        device: of this process.
        group: the processes of the pipeline, in the order of the stages; None takes all.
    """
    feed = task.feed(split, device)
    rows = feed.order(np.arange(min(limit or len(feed), len(feed))))
    parts = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    outcomes = evaluate_outcomes(stage, (feed.microbatches(part, len(part))[0] for part in parts), device, group)
    write = partial(generate_on_stages, stage, device=device, group=group) if final else None
    return task.metrics(split, rows, outcomes, write)


def evaluate_outcomes(
    stage: Stage,
    microbatches: Iterable[Microbatch],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`Stage.outcomes` of all examples on every process, in order and without fillers, on the CPU: (n, ...).

    The microbatches may differ in shape. A stage begins with the next one when it has given one on.
    """
    link, found = StageLink(stage, device, group), []
    with eval_mode(stage), torch.no_grad():
        for microbatch in microbatches:
            reads: dict[str, Any] = {name: microbatch.kwargs[name] for name in stage.reads if name in microbatch.kwargs}
            hidden = link.through(microbatch.first, **reads)
            if hidden is not None:
                found.append(stage.outcomes(hidden, microbatch.kwargs)[: microbatch.examples - microbatch.absent].cpu())
    return link.broadcast(torch.cat(found) if stage.last else None)


@dataclass(frozen=True)
class Pass:
    """One forward pass of a search.

    Args:
        tokens: new ones, (b, t).
        positions: theirs, (b, t).
        mask: 1 at tokens and 0 at padding, those before among them, (b, past + t); None where nothing is padded.
        order: which row of the pass before each row goes on from, (b,); None where each goes on from itself.
        fresh: nothing came before.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None
    order: Tensor | None
    fresh: bool

    def run(self, link: StageLink, keys: Any) -> Tensor | None:
        """Take this process's part in it; see `StageLink.through`.

        Args:
            link: this process's.
            keys: its cache, in order.
        """
        return link.through(
            self.tokens, attention_mask=self.mask, position_ids=self.positions, past_key_values=keys, use_cache=True
        )


def announce(link: StageLink, one: Pass | None) -> None:
    """On the last stage: tell the others what comes now; None ends their work."""
    if one is None:
        link.broadcast_(torch.zeros(5, dtype=torch.int64, device=link.device))
        return
    (b, t), parts = one.tokens.shape, (one.mask, one.order)
    sizes = [0 if part is None else part.numel() for part in parts]
    link.broadcast_(torch.tensor([1 + one.fresh, b, t, *sizes], device=link.device))
    given = (one.tokens, one.positions, *(part for part in parts if part is not None))
    link.broadcast_(torch.cat([part.reshape(-1) for part in given]))


def hear(link: StageLink) -> Pass | None:
    """On the other stages: what the last one announced."""
    kind, b, t, *sizes = link.broadcast_(torch.zeros(5, dtype=torch.int64, device=link.device)).tolist()
    if not kind:
        return None
    numbers = torch.empty(2 * b * t + sum(sizes), dtype=torch.int64, device=link.device)
    tokens, positions, mask, order = link.broadcast_(numbers).split([b * t, b * t, *sizes])
    return Pass(
        tokens.view(b, t),
        positions.view(b, t),
        mask.view(b, -1) if len(mask) else None,
        order if len(order) else None,
        kind > 1,
    )


def generate_on_stages(
    stage: Stage,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    settings: GenerateConfig,
    ends: Sequence[int] = (),
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """What `tasks.beam_search.generate` writes with the whole model; every process calls it alike and gets the texts.

    Args:
        stage: of a causal language model.
        tokenizer, prompts, settings, ends: as there.
        device: of this process.
        group: the processes of the pipeline, in the order of the stages; None takes all.

    Raises:
        UserError: as there, on every process; another error of the last stage's own is a RuntimeError on the others.
    """
    link = StageLink(stage, device, group)
    if stage.last:
        try:
            texts = _search(link, tokenizer, prompts, settings, ends)
        except Exception as error:
            link.broadcast(_for_others(error))
            raise
        return link.broadcast(texts)
    _serve(link)
    found = link.broadcast(None)
    if isinstance(found, Exception):
        raise found
    return found


def _search(
    link: StageLink, tokenizer: Any, prompts: Sequence[list[int]], settings: GenerateConfig, ends: Sequence[int]
) -> list[str]:
    try:
        return generate(Searcher(link), tokenizer, prompts, settings, ends, device=link.device)
    finally:
        announce(link, None)


def _serve(link: StageLink) -> None:
    """Take part in every pass that is announced, until none comes any more."""
    config: Any = link.stage.config
    keys: Any = None
    with eval_mode(link.stage), torch.no_grad():
        while (one := hear(link)) is not None:
            if one.fresh:
                keys = DynamicCache(config=config)
            elif one.order is not None:
                keys.reorder_cache(one.order)
            one.run(link, keys)


def _for_others(error: Exception) -> Exception:
    """What the other stages raise: only a `UserError` is sure to travel."""
    return error if type(error) is UserError else RuntimeError(f"The last stage failed to generate text: {error!r}.")


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
        link: of the last stage.
    """

    def __init__(self, link: StageLink) -> None:
        stage: Any = link.stage
        config = copy.deepcopy(stage.config)
        config._attn_implementation = "eager"  # transformers asks whether it can do the stage's own, and it has none
        super().__init__(config)
        self.stage, self._link = stage, link

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
        announce(self._link, one)
        hidden = one.run(self._link, past_key_values)
        assert hidden is not None, "the search is on the last stage"
        logits = self.stage.logits(hidden[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
