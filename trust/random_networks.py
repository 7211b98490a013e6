"""Clips random networks in every mode, and compares them with a float64 loop:  python -m trust.random_networks 300

A network is a random sequence of `OPERATIONS`, some with the layer of an earlier operation. Groups, thresholds and
microbatches are random too. Exit code 1 if a clipped sum is off by more than 1e-8 of its threshold.
"""

import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import Group, attach, flat, per_layer
from groupwise.clipping.partition import find_layers
from groupwise.clipping.reference import clipped_sums

D, WORDS = 6, 10

OPERATIONS: tuple[tuple[Any, tuple[Any, ...], Any], ...] = (
    (nn.Linear, (D, D), lambda m, x, y, t: m(torch.tanh(x))),
    (nn.Linear, (D, D), lambda m, x, y, t: F.linear(x, m.weight.t(), m.bias)),
    (nn.Linear, (D, D), lambda m, x, y, t: m(torch.tanh(m(x)))),
    (nn.Linear, (D, D), lambda m, x, y, t: m(x.transpose(0, 1)).transpose(0, 1)),
    (nn.Linear, (D, D), lambda m, x, y, t: torch.stack([*map(m, x.unbind(1))], 1)),
    (nn.Linear, (D, D), lambda m, x, y, t: checkpoint(m, x, use_reentrant=False)),
    (nn.Linear, (D, D), lambda m, x, y, t: x + m(x).detach()),
    (nn.Bilinear, (D, D, D), lambda m, x, y, t: m(x, y)),
    (nn.LayerNorm, (D,), lambda m, x, y, t: m(x)),
    (nn.RMSNorm, (D,), lambda m, x, y, t: m(x)),
    (nn.GroupNorm, (2, D), lambda m, x, y, t: m(x.mT).mT),
    (nn.Conv1d, (D, D, 3, 1, 1), lambda m, x, y, t: m(x.mT).mT),
    (nn.Conv1d, (D, D, 1, 1, 0, 1, 2), lambda m, x, y, t: m(x.mT).mT),
    (nn.LSTM, (D, D, 1, True, True), lambda m, x, y, t: m(x)[0]),
    (nn.MultiheadAttention, (D, 2, 0.0, True, False, False, None, None, True), lambda m, x, y, t: x + m(x, y, y)[0]),
    (nn.PReLU, (), lambda m, x, y, t: m(x)),
    (nn.Embedding, (WORDS, D), lambda m, x, y, t: x + m(t)),
    (nn.Embedding, (WORDS, D), lambda m, x, y, t: x + m.weight[t]),
    (nn.Embedding, (WORDS, D), lambda m, x, y, t: (x @ m.weight.t()).softmax(-1) @ m.weight),
    (nn.EmbeddingBag, (WORDS, D), lambda m, x, y, t: x + m(t).unsqueeze(1)),
    (nn.Embedding, (WORDS, D), lambda m, x, y, t: x + m(torch.arange(x.shape[1]))),
    (nn.Linear, (D, 1, False), lambda m, x, y, t: x * m.weight[0].cumsum(0)),
    (nn.Linear, (D, 1, False), lambda m, x, y, t: torch.where(x > 0, x, m.weight)),
    (nn.Linear, (D, 1, False), lambda m, x, y, t: torch.cat([m.weight.expand(len(x), 1, D), x], 1)[:, :-1]),
    (nn.Linear, (D, D, False), lambda m, x, y, t: torch.einsum("btd,de->bte", x, m.weight)),
    (nn.Linear, (D, 2 * D, False), lambda m, x, y, t: F.linear(x, m.weight[:D]) + F.linear(y, m.weight[D:])),
    (nn.Identity, (), lambda m, x, y, t: (x * 1.0).mul_(2).relu_()),
    (nn.Identity, (), lambda m, x, y, t: x + torch.sigmoid(y)),
    (nn.Identity, (), lambda m, x, y, t: torch.softmax(x @ y.mT, -1) @ x),
)
"""A layer's class and arguments, and the function (layer, state, earlier state, tokens (B, T)) -> next state."""


def errors_of(seed: int) -> list[float]:
    """The errors of network number `seed`, relative to the threshold: ghost, flat, per layer, two random groups."""
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    size, length = draw.choice((3, 5, 8)), draw.choice((4, 7))  # never equal
    x, tokens = torch.randn(size, length, D, dtype=torch.float64), torch.randint(WORDS, (size, length))
    labels = torch.randint(3, (size,))
    network, steps = nn.ModuleList([nn.Linear(D, 3).double()]), list[tuple[Any, nn.Module, int]]()
    for make, sizes, apply in draw.choices(OPERATIONS, k=draw.randint(3, 12)):
        network.append(make(*sizes).double())
        alike = [layer for layer in network if repr(layer) == repr(network[-1])]
        steps.append((apply, draw.choice(alike), draw.randint(1, 3)))

    def losses_of(rows: Sequence[int]) -> Tensor:
        states = [x[list(rows)]]
        for apply, layer, back in steps:
            states.append(apply(layer, states[-1], states[-min(back, len(states))], tokens[list(rows)]))
        return F.cross_entropy(network[0](states[-1].tanh().mean(1)), labels[list(rows)], reduction="none")

    losses_of(range(size)).sum().backward()
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.grad is not None)  # a parameter without effect is frozen
    names = draw.sample(found := [layer.name for layer in find_layers(network)], len(found))
    groups = tuple(Group(str(i), tuple(names[i::2])) for i in range(2) if names[i::2])
    errors = []
    for i, partition in enumerate((flat(network), flat(network), per_layer(network), groups)):
        threshold, step = draw.choice((0.01, 0.1, 1.0)), draw.choice((1, 2, size))
        each = [threshold] * len(partition)
        truth = clipped_sums(network, lambda row: losses_of([row])[0], range(size), partition, each).sums
        network.zero_grad()
        with attach(network, partition, threshold, norms="bookkeeping" if i else "ghost") as engine:
            engine.trace(losses_of, range(size))
            for start in range(0, size, step):
                engine.clip(losses_of, range(start, min(size, start + step)))
        off = (network.get_parameter(name).grad - total for name, total in truth.items())  # type: ignore[operator]
        errors.append(max(float(difference.norm()) for difference in off) / threshold)
    return errors


def main(count: int) -> int:
    """Check networks 0 to count - 1; returns the exit code."""
    warnings.simplefilter("ignore")
    errors = {seed: max(errors_of(seed)) for seed in range(count)}
    wrong = [seed for seed, error in errors.items() if not error < 1e-8]
    print(f"{count} networks in 4 modes, wrong: {wrong or 'none'}; the largest error is {max(errors.values()):.0e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 300))
