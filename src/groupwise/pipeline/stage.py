"""The stages of a split causal language model."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.pipeline.model_parts import Family, ModelParts
from groupwise.tasks.text_task import at_least_float32, per_example, token_losses


class Stage(nn.Module, ABC):
    """A part of a model, from hidden activations to hidden activations.

    The first stage (`index` 0) takes token ids, and the last one (`count` - 1) returns losses.
    """

    reads: tuple[str, ...] = ()
    """Names of a microbatch's arguments that `hidden` takes."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index, self.count = index, count
        self.first, self.last = index == 0, index == count - 1
        self.names: dict[str, str] = {}
        """Name in `state_dict()` → name in the whole model, so that stages can be joined or split differently."""

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        """Run the stage.

        Args:
            x: token ids (b, T) on the first stage, else the output of the previous stage.
            kwargs: of a `training.task.Microbatch`; a stage ignores those that it does not use.

        Returns:
            Hidden activations, contiguous and of `dtype`; on the last stage the examples' weighted losses, (b,).
        """
        hidden = self.hidden(x, **{name: kwargs[name] for name in self.reads if name in kwargs})
        if not self.last:
            return hidden
        losses = self.losses(hidden, kwargs)
        return losses * kwargs["weights"] if "weights" in kwargs else losses

    @abstractmethod
    def hidden(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The forward pass without head and loss."""

    @abstractmethod
    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """On the last stage: one loss per example, (b,), from its hidden activations, without weights."""

    @abstractmethod
    def activation(self, b: int, T: int) -> tuple[int, ...]:
        """The shape of the activations between stages, for b rows of T tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations between stages: that of the frozen matrices, including the embedding."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        return next((p for p in matrices if not p.requires_grad), matrices[0]).dtype


class TextStage(Stage):
    """A stage of a causal language model. The model's own `body` runs it, and makes masks and rotary positions.

    After the first stage, hidden activations are passed as embeddings: the position table is replaced by zeros and the
    embedding dropout by the identity. Before the last stage the identity replaces the final norm.
    """

    reads = ("attention_mask", "position_ids")

    def __init__(
        self,
        anatomy: ModelParts,
        ranges: tuple[tuple[int, int], ...],
        index: int,
        *,
        rematerialize: bool,
        token_loss: str,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(index, len(ranges))
        config = anatomy.network.config
        self.body, self._width = anatomy.body, config.hidden_size
        self.head = anatomy.network.get_output_embeddings() if self.last else None
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._token_loss, self._precision = token_loss, precision
        _keep_blocks(self.body, anatomy.family, *ranges[index])
        _neutralize(self.body, anatomy.family, first=self.first, last=self.last)
        if rematerialize:
            again = partial(checkpoint, use_reentrant=False, preserve_rng_state=_drops_out(self.body))
            for block in getattr(self.body, anatomy.family.blocks):
                block.gradient_checkpointing, block._gradient_checkpointing_func = True, again

    @property
    def config(self) -> Any:
        """The transformers configuration of this stage, with its own number of layers, for a key-value cache."""
        return self.body.config

    def hidden(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The forward pass without head and loss, (b, T, d).

        Args:
            x: as in `forward`.
            kwargs: as in transformers: attention_mask, position_ids, and for generation past_key_values (of this
                stage's blocks) with use_cache=True.
        """
        given = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        with self._precision():
            hidden = self.body(**given | kwargs).last_hidden_state
        return hidden if self.last else hidden.to(self.dtype).contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits from hidden activations of the last stage: (..., d) -> (..., V), float32 at least."""
        with self._precision():
            logits = self.head(hidden)  # type: ignore[misc]
            if self._softcap is not None:
                logits = torch.tanh(logits / self._softcap) * self._softcap
        return at_least_float32(logits)

    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """Mean or sum over each example's own tokens, (b,), as in `tasks`; the head runs only at `places`."""
        at_places = torch.take_along_dim(hidden, kwargs["places"].unsqueeze(-1), dim=1)
        return per_example(token_losses(self.logits(at_places), kwargs["labels"]), kwargs["labels"], self._token_loss)

    def activation(self, b: int, T: int) -> tuple[int, ...]:
        """(b, T, d)."""
        return (b, T, self._width)


class NoPositions(nn.Module):
    """Replaces a table of positions after the first stage: its output is zero."""

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        """0 on the device of the first argument."""
        return torch.zeros((), device=first.device)


def _keep_blocks(body: Any, family: Family, start: int, stop: int) -> None:
    """Keep blocks [start, stop), and number them from 0 in the modules and the configuration."""
    blocks = nn.ModuleList(getattr(body, family.blocks)[start:stop])
    setattr(body, family.blocks, blocks)
    for module in blocks.modules():
        for name in ("layer_idx", "layer_id"):
            if isinstance(number := getattr(module, name, None), int):
                setattr(module, name, number - start)
    body.config = with_blocks(body.config, start, stop)


def with_blocks(config: Any, start: int, stop: int) -> Any:
    """A copy of a configuration of transformers, for blocks [start, stop) alone."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = stop - start
    if getattr(changed, "layer_types", None) is not None:
        changed.layer_types = changed.layer_types[start:stop]
    return changed


def _neutralize(body: Any, family: Family, *, first: bool, last: bool) -> None:
    """Remove the modules that only the first or the last stage needs."""
    if not first:
        for name in filter(None, (family.tokens, family.project_in)):
            setattr(body, name, None)
        if family.positions:
            setattr(body, family.positions, NoPositions())
        if family.dropout:
            setattr(body, family.dropout, nn.Identity())
    if not last:
        if getattr(body, family.norm) is not None:
            setattr(body, family.norm, nn.Identity())
        if family.project_out:
            setattr(body, family.project_out, None)


def _drops_out(body: Any) -> bool:
    """Whether a block may draw random numbers, which must be the same when it is recomputed."""
    rates = [value for name, value in body.config.to_dict().items() if "drop" in name]
    modules = [module.p for module in body.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates + modules)
