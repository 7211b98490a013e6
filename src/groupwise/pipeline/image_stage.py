"""Cuts a wide residual network, for tests of pipelines and small images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.pipeline.model_parts import Anatomy
from groupwise.pipeline.stage import Stage
from groupwise.tasks.image_classification import image_outcomes


class ImageStage(Stage):
    """The stem, blocks, and what follows them to the cross-entropy of each image."""

    def __init__(
        self,
        anatomy: Anatomy,
        ranges: tuple[tuple[int, int], ...],
        index: int,
        *,
        rematerialize: bool,
        token_loss: str,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(index, len(ranges))
        network, (start, stop) = anatomy.network, ranges[index]
        convolutions = [getattr(block.conv1, "conv", block.conv1) for block in anatomy.blocks]
        self._shapes = _after(convolutions[:start]), _after(convolutions[:stop])
        self._rematerialize, self._precision = rematerialize, precision
        self.entry = nn.ModuleList(anatomy.entry if self.first else ())
        self.blocks = nn.ModuleList(anatomy.blocks[start:stop])
        self.final_norm = network.final_norm if self.last else None
        self.classifier = network.classifier if self.last else None

    def hidden(self, x: Tensor, **_: Any) -> Tensor:
        """The pass without classifier and loss."""
        with self._precision():
            for module in self.entry:
                x = module(x)
            if len(self.entry) > 1:  # a stem with a norm ends with a ReLU
                x = F.relu(x)
            for block in self.blocks:
                again = self._rematerialize and torch.is_grad_enabled()
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if again else block(x)
        return x if self.last else x.to(self.dtype).contiguous()

    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of each image, (b,)."""
        return F.cross_entropy(self.logits(hidden), kwargs["labels"], reduction="none")

    def outcomes(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of each image, and whether its class was found, (b, 2)."""
        return image_outcomes(self.logits(hidden), kwargs["labels"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the classes from hidden activations of the last stage, (b, classes), float32 at least."""
        assert self.classifier is not None
        with self._precision():
            if self.final_norm is not None:
                hidden = self.final_norm(F.relu(hidden))
            logits = self.classifier(torch.mean(hidden, dim=(2, 3)))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def activation(self, b: int, T: int, *, before: bool = False) -> tuple[int, ...]:
        """(b, channels, T / strides, T / strides), rounded up."""
        channels, strides = self._shapes[0 if before else 1]
        return (b, channels, -(-T // strides), -(-T // strides))


def _after(convolutions: Sequence[Any]) -> tuple[int, int]:
    """Channels, and how many times smaller an image is, after blocks whose first convolutions these are."""
    channels = convolutions[-1].out_channels if convolutions else 0
    return channels, prod(int(convolution.stride[0]) for convolution in convolutions)
