"""Says which layers' tensors are cut over several processes, and adds up their squared norms (tensor parallelism).

Every process clips with plain local tensors: what a layer's rule takes for the weight is this process's part of it. The
squares of all parts add up to ‖g‖², by one all-reduce of (b,) numbers for each group that closes, or one for all that
close together. That ‖all parts‖ ≤ C follows from this sum and from nothing else, whatever the parts are parts of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """What an engine must know of a model whose tensors are cut over several processes.

    All processes have the same layers. A tensor is cut, or whole and owned by the first process: then the others have
    a copy, or, where only their sum is needed (the bias of a layer whose outputs are added up), nothing.
    """

    cut: frozenset[str]
    """Layers of whose tensors each process has a part."""
    copies: frozenset[str]
    """Parameters here that another process owns, which clips and noises them for all."""
    sizes: Mapping[str, int]
    """How many trainable numbers each layer has over all processes; one that shares a tensor counts it if it is the
    first."""
    add_up: Callable[[Tensor], None] | None
    """Adds squared norms (K, b) up over the processes, in place; None: every process's share of the model is a group of
    its own (clipping per device), whose norm is nobody else's."""

    def holds(self, layers: Sequence[str]) -> bool:
        """Whether a group of these layers is clipped by a norm that other processes have a part in."""
        return self.add_up is not None and not self.cut.isdisjoint(layers)

    def counts(self, layer: str, names: Sequence[str], group: Sequence[str]) -> bool:
        """Whether the norm of a layer, whose trainable parameters have these names, is taken here.

        That of a copy is the owner's to take, where it is one of several in the norm of a cut group; in a group of
        copies alone, every process finds the whole norm by itself.
        """
        return layer in self.cut or self.cut.isdisjoint(group) or not self.copies.issuperset(names)

    def owned(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
        """Those parameters of a group whose sums this process releases."""
        return tuple(p for name, p in zip(names, parameters, strict=True) if name not in self.copies)


def add_up(squares: list[Tensor], parts: Sequence[Parts | None]) -> list[Tensor]:
    """Squared norms (b,) of groups that close together -> over all processes, where a group has `parts` elsewhere."""
    cut = [i for i, each in enumerate(parts) if each is not None]
    adds = [each.add_up for each in parts if each is not None and each.add_up is not None]
    if not adds:
        return squares
    table = torch.stack([squares[i] for i in cut])
    adds[0](table)  # one model, so they are all the same
    whole = dict(zip(cut, table.unbind(), strict=True))
    return [whole.get(i, rows) for i, rows in enumerate(squares)]
