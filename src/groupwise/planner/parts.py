"""Foretells what a process holds and sends where a model's tensors are cut over several (`parallel.kind=tensor`).

Weights, gradients and the optimiser's moments of what is cut are divided; what is whole is not. Messages are counted
one by one: sums of activations and of their gradients, two small ones for the loss, one of b numbers for each group
that is cut, and at the end of a step what the first process released of what all have whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from groupwise.clipping import Partition, flat, per_block, per_layer
from groupwise.errors import UserError, did_you_mean
from groupwise.planner.options import PlanOptions
from groupwise.planner.shapes import build, configuration
from groupwise.tensor.plan import Cut, cuts_of

PARTITIONS = {"flat": flat, "ghost": flat, "layer": per_layer, "block": per_block}
CLIPPINGS = ("none", "device", *PARTITIONS)
NORM = 8
"""Bytes of a squared norm, and of a count."""
MOMENTS = 2


@dataclass(frozen=True)
class Parts:
    """What one of the processes needs and does in a step.

    Args:
        parameters: numbers that it holds, at most.
        state: bytes of weights, gradients and two moments of what trains.
        activations, norms, released: messages of one step, {bytes of one: how often}: those of forward and backward
            passes (the loss included), those for clipping, and the last ones.
    """

    parameters: int
    state: int
    activations: Counter[int]
    norms: Counter[int]
    released: Counter[int]

    @property
    def messages(self) -> int:
        """All of a step."""
        return sum((self.activations + self.norms + self.released).values())

    @property
    def traffic(self) -> int:
        """Bytes that the process puts into them."""
        every = self.activations + self.norms + self.released
        return sum(size * often for size, often in every.items())


def foretell(
    model: nn.Module, parts: int, clipping: str, microbatches: Sequence[int], length: int, places: int | None = None
) -> Parts:
    """Of a causal language model that is whole, on any device (meta too).

    Args:
        model: all of it.
        parts: processes.
        clipping: none, device, flat, ghost, layer or block.
        microbatches: examples in each of the step's.
        length: tokens of an example.
        places: tokens of an example that the loss is on; None: all but the last.

    Raises:
        UserError: as `cuts_of`; an unknown clipping.
    """
    if clipping not in CLIPPINGS:
        raise UserError(f"clipping={clipping} is unknown{did_you_mean(clipping, CLIPPINGS)}: {', '.join(CLIPPINGS)}.")
    cuts = cuts_of(model, parts)
    layers = {each.name for each in cuts}
    partition: Partition = PARTITIONS[clipping](model) if clipping in PARTITIONS else ()
    groups = sum(not layers.isdisjoint(group.layers) for group in partition)
    passes, places = 2 if clipping == "ghost" else 1, length - 1 if places is None else places
    item = next(model.parameters()).element_size()
    found = Parts(*_held(model, cuts, parts), Counter(), Counter(), _released(model, layers, len(partition)))
    width = int(model.config.get_text_config().hidden_size)  # type: ignore[operator,union-attr]
    for rows in microbatches:
        whole, at_head = rows * length * width * item, rows * (places + 1) * width * item
        found.activations[whole] += sum(each.way in ("rows", "table") for each in cuts)
        found.activations[whole] += passes * len({_around(each) for each in cuts if each.way == "columns"})
        if any(each.way == "head" for each in cuts):
            found.activations[at_head] += passes
            wide = max(item, 4) * rows * places
            found.activations.update((wide, 2 * wide))
        if groups:
            found.norms[NORM * rows] += groups
    return found


def _around(each: Cut) -> str:
    return each.name.rpartition(".")[0]


def _held(model: nn.Module, cuts: Sequence[Cut], parts: int) -> tuple[int, int]:
    """Numbers, and bytes of state, of the first process, which has what is whole and the larger parts."""
    axes = {
        id(parameter): (each.axis(name), each.pieces)
        for each in cuts
        for name, parameter in each.module.named_parameters(recurse=False)
    }
    numbers = state = 0
    for parameter in model.parameters():
        axis, pieces = axes.get(id(parameter), (None, 1))
        here = parameter.numel()
        if axis is not None:
            length = parameter.shape[axis]
            here = here // length * pieces * -(-length // pieces // parts)
        numbers += here
        state += here * parameter.element_size() * (2 + MOMENTS if parameter.requires_grad else 1)
    return numbers, state


def _released(model: nn.Module, layers: set[str], groups: int) -> Counter[int]:
    """One message for each dtype: gradients of what is whole in all processes, and counts of groups."""
    sizes: Counter[torch.dtype] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.rpartition(".")[0] not in layers:
            sizes[parameter.dtype] += parameter.nbytes
    if groups:
        sizes[torch.float64] += NORM * groups
    return Counter(sizes.values())


def told(options: PlanOptions) -> str:
    """Lines for a person: of a step of per-layer clipping, and of clipping per device, which sends no norms.

    Raises:
        UserError: as `foretell`; weights, gradients and moments that do not fit.
    """
    model = build(configuration(options.model), rank=0, targets=(), dtype="float32")
    microbatch = options.microbatch or 1
    whole, rest = divmod(options.batch, microbatch)
    rows = [microbatch] * whole + [rest] * bool(rest)
    found = foretell(model, options.parts, "layer", rows, options.length, options.places)
    norms = sum(found.norms.values()), sum(size * often for size, often in found.norms.items())
    every = sum(parameter.numel() for parameter in model.parameters())
    if found.state > options.room:
        raise UserError(
            f"{options.model} in {options.parts} parts needs {found.state / 1e9:.1f} GB in the fullest process for "
            f"weights, gradients and moments alone, and {options.room / 1e9:.1f} are there: give more parts."
        )
    return (
        f"Tensors in {options.parts} parts: {found.parameters / 1e6:,.1f} of {every / 1e6:,.1f} million numbers in the "
        f"fullest process, {found.state / 1e9:.2f} GB with gradients and moments of the {options.room / 1e9:.1f} that "
        f"are there; activations are not foretold.\n"
        f"A step sends {found.messages:,} messages from each, {found.traffic / 1e9:.3f} GB; of these per-layer "
        f"clipping needs {norms[0]:,} with {norms[1] / 1e6:.3f} MB together, and clipping per device none."
    )
