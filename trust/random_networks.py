"""Clips random networks in every mode, and compares them with a float64 loop:  python -m trust.random_networks 300

A network is a random sequence of `OPERATIONS`, some with the layer of an earlier operation. Groups, thresholds and
microbatches are random too. Exit code 1 if a norm or a clipped sum is off by a relative 1e-8 (see `trust.models`).
"""

import random
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import Group, attach, flat, per_layer
from groupwise.clipping.partition import find_layers
from groupwise.errors import UserError, command
from trust.models.architecture import Batch, Subject
from trust.models.check import TOLERANCE, choose_thresholds, compare, losses_of
from trust.models.truth import find_truth, freeze_unreached, parameters_of, trained

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
    """The errors of network number `seed`, as `compare` has them: ghost, flat, per layer, two random groups."""
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    size, length = draw.choice((3, 5, 8)), draw.choice((4, 7))  # never equal
    x, tokens = torch.randn(size, length, D, dtype=torch.float64), torch.randint(WORDS, (size, length))
    network, steps = nn.ModuleList([nn.Linear(D, 3).double()]), list[tuple[Any, nn.Module, int]]()
    for make, sizes, apply in draw.choices(OPERATIONS, k=draw.randint(3, 12)):
        network.append(make(*sizes).double())
        alike = [layer for layer in network if repr(layer) == repr(network[-1])]
        steps.append((apply, draw.choice(alike), draw.randint(1, 3)))

    def losses(network: Any, batch: Batch) -> Tensor:
        states = [batch["x"]]
        for apply, layer, back in steps:
            states.append(apply(layer, states[-1], states[-min(back, len(states))], batch["tokens"]))
        return F.cross_entropy(network[0](states[-1].tanh().mean(1)), batch["labels"], reduction="none")

    subject = Subject(network, {"x": x, "tokens": tokens, "labels": torch.randint(3, (size,))}, losses)
    freeze_unreached(subject)
    truth = find_truth(subject)
    names = draw.sample(found := [layer.name for layer in find_layers(network)], len(found))
    random_groups = tuple(Group(str(i), tuple(names[i::2])) for i in range(2) if names[i::2])
    errors = []
    for i, partition in enumerate((flat(network), flat(network), per_layer(network), random_groups)):
        groups = parameters_of(network, tuple(group.layers for group in partition))
        thresholds = choose_thresholds(truth.norms(groups)) * draw.choice((0.1, 1.0, 10.0))
        step, norms = draw.choice((1, 2, size)), []
        network.zero_grad()
        with attach(network, partition, thresholds, norms="bookkeeping" if i else "ghost") as engine:
            engine.trace(partial(losses_of, subject), range(size))
            for start in range(0, size, step):
                engine.clip(partial(losses_of, subject), range(start, min(size, start + step)))
                norms.append(engine.per_example_norms)
        sums = {name: parameter.grad for name, parameter in trained(network).items()}
        errors.append(compare(sums, torch.cat(norms, 1), truth, groups, thresholds)[0])
    return errors


@command
def main(count: str = "300") -> int:
    """Check networks 0 to count - 1; returns the exit code."""
    if not count.isdecimal() or int(count) == 0:
        raise UserError(f"'{count}' was given: give the number of networks, a whole number of at least 1.")
    warnings.simplefilter("ignore")
    errors = {seed: max(errors_of(seed)) for seed in range(int(count))}
    wrong = [seed for seed, error in errors.items() if not error < TOLERANCE]
    print(f"{count} networks in 4 modes, wrong: {wrong or 'none'}; the largest error is {max(errors.values()):.0e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
