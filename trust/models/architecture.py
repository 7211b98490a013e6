"""An architecture builds a small model, a batch for it, and a function for its per-example losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
"""Tensors by name, the examples on the first axis of each."""


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its batch; each architecture uses those that apply to it.

    Args:
        batch: examples. tokens: length of a sequence. width: features of a hidden layer, a multiple of 8.
        depth: layers. image: edge of an image in pixels, a multiple of 16. vocabulary: number of token ids.
        dropout: probability of every dropout and stochastic depth.
    """

    batch: int = 5
    tokens: int = 8
    width: int = 16
    depth: int = 2
    image: int = 32
    vocabulary: int = 40
    dropout: float = 0.0

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each example without padding, (B,): `tokens` in the first, fewer in the others."""
        return self.tokens - torch.arange(self.batch) % max(1, self.tokens // 2)

    @property
    def mask(self) -> Tensor:
        """1 where there is a token, 0 where there is padding, (B, T) int64."""
        return (torch.arange(self.tokens) < self.lengths[:, None]).long()

    def ids(self, vocabulary: int | None = None) -> Tensor:
        """Random tokens, (B, T) int64; 0 is padding."""
        return torch.randint(3, vocabulary or self.vocabulary, (self.batch, self.tokens)) * self.mask

    def labels(self, classes: int = 3) -> Tensor:
        """Random classes, (B,) int64."""
        return torch.randint(classes, (self.batch,))

    def vectors(self, *shape: int) -> Tensor:
        """Random numbers, (B, *shape), with a different scale for each example."""
        return torch.randn(self.batch, *shape) * torch.linspace(0.5, 1.5, self.batch).view(-1, *[1] * len(shape))

    def images(self, channels: int = 3) -> Tensor:
        """Random images, (B, channels, image, image)."""
        return self.vectors(channels, self.image, self.image)


@dataclass(frozen=True)
class Subject:
    """A built architecture: the model, its batch, and (model, batch) -> per-example losses (B,)."""

    model: nn.Module
    batch: Batch
    losses: Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    Args:
        name: unique. family: its library.
        make: builds it; the caller has seeded torch's generator.
        mixes: one example's loss depends on the others, so the architecture must be refused.
        needs: a package that is not in requirements.txt; the committed rows are kept if it is not installed.
    """

    name: str
    family: str
    make: Callable[[Size], Subject]
    mixes: bool = False
    needs: str = ""


def in_eval(module: nn.Module) -> nn.Module:
    """Put a module into eval mode permanently, as `verify` advises for some layers; `train` has no effect on it."""
    module.eval().train = lambda mode=True: module  # type: ignore[method-assign]
    return module


def classified(logits: Tensor, labels: Tensor) -> Tensor:
    """Per-example cross-entropy: logits (B, classes), labels (B,) -> (B,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def decisions(model: nn.Module, batch: Batch) -> Tensor:
    """`classified` for a model that takes all tensors of the batch except the labels, in their order, (B,)."""
    return classified(model(*(values for name, values in batch.items() if name != "labels")), batch["labels"])


def next_tokens(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens of each example except the first: (B, T, words), (B, T), (B, T) -> (B,)."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1).clamp_min(1)


def each_token(model: nn.Module, batch: Batch) -> Tensor:
    """`next_tokens` for a model that takes all tensors except the mask, and predicts the last of them, (B,)."""
    inputs = [values for name, values in batch.items() if name != "mask"]
    return next_tokens(model(*inputs), inputs[-1], batch["mask"])
