"""Defines a stage of a cut model, whatever the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.tensor.plan import Cut


class Stage(nn.Module, ABC):
    """One piece of a model: hidden activations in and out, token ids or images into the first, losses out of the last.

    Args:
        index: 0 ... count - 1.
        count: stages.
    """

    reads: tuple[str, ...] = ()
    """What `hidden` takes of a microbatch."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index, self.count = index, count
        self.first, self.last = index == 0, index == count - 1
        self._names: dict[str, str] = {}
        self.cuts: list[Cut] = []
        """How its layers are cut over processes, where they are (tensor parallelism)."""

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        """Run the piece.

        Args:
            x: token ids (b, T) or images (b, C, H, W) on the first stage, else what the stage before returned.
            kwargs: as `feed.Microbatch` has them; a stage ignores those that it does not take.

        Returns:
            hidden activations, contiguous and of `dtype`; on the last stage one loss an example times its weight, (b,).
        """
        hidden = self.hidden(x, **{name: kwargs[name] for name in self.reads if name in kwargs})
        if not self.last:
            return hidden
        losses = self.losses(hidden, kwargs)
        return losses * kwargs["weights"] if "weights" in kwargs else losses

    @abstractmethod
    def hidden(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The pass without head and loss."""

    @abstractmethod
    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """On the last stage, from its hidden activations to one loss an example, (b,), without weights."""

    def outcomes(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """On the last stage, what an evaluation needs of each example, without weights: here its loss, (b,)."""
        return self.losses(hidden, kwargs)

    @abstractmethod
    def activation(self, b: int, T: int, *, before: bool = False) -> tuple[int, ...]:
        """The shape that this stage sends on, for b rows of T tokens, or b images with sides of T pixels.

        With `before`, the shape of what a stage after the first gets.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Of what stages send to each other: that of the matrices that do not train, which includes the embedding."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        return next((p for p in matrices if not p.requires_grad), matrices[0]).dtype

    def names(self) -> dict[str, str]:
        """Each name of `state_dict()` → its name in the whole model's, so that stages can be joined or cut anew."""
        return dict(self._names)

    def take_cuts(self, cuts: Sequence[Cut]) -> None:
        """Learn which layers are cut over processes, from those of the whole model."""
        names = {id(module): name for name, module in self.named_modules()}
        self.cuts = [replace(each, name=names[id(each.module)]) for each in cuts if id(each.module) in names]

    def remember(self, modules: Mapping[int, str]) -> None:
        """Learn what the whole model calls each module, by its id; done by `cut`."""
        for name in self.state_dict():
            module, _, leaf = name.rpartition(".")
            self._names[name] = f"{modules[id(self.get_submodule(module))]}.{leaf}".lstrip(".")
