"""Examples with non-finite gradients add nothing to a sum, are counted, and the sum keeps its sensitivity bound."""

import math
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.config.schema import ClipConfig
from groupwise.training.from_config import make_engine
from trust.faults.process import Outcome

MODES = (
    ClipConfig("flat", grouping="flat", policy="fixed"),
    ClipConfig("ghost", grouping="flat", norms="ghost", policy="fixed"),
    ClipConfig("fixed_layer", policy="fixed"),
    ClipConfig("adaptive_layer"),
    ClipConfig("fixed_block", grouping="block", policy="fixed"),
    ClipConfig("adaptive_block", grouping="block"),
    ClipConfig("adaptive_flat", grouping="flat"),
    ClipConfig("automatic", rule="automatic"),
    ClipConfig("custom", grouping="custom", mapping={"0": "early", "*": "late"}),
)
BAD = (math.nan, math.inf, -math.inf, 1e30)
"""1e30 has a finite loss, but its squared gradient norm overflows in the first layer."""
EXAMPLES, WIDTH = 12, 6


class Case:
    """A small model with an engine, and examples some of which have non-finite gradients."""

    def __init__(self, mode: ClipConfig, chance: random.Random) -> None:
        torch.manual_seed(chance.randrange(1 << 30))
        self.model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
        self.engine: ClippingEngine = make_engine(self.model, mode)  # type: ignore[assignment]
        self.thresholds = torch.tensor([chance.uniform(0.01, 2.0) for _ in self.engine.groups], dtype=torch.float64)
        self.engine.set_thresholds(self.thresholds)
        self.x, self.y = torch.randn(EXAMPLES, WIDTH), torch.randint(0, 3, (EXAMPLES,))
        self.engine.trace(self._losses_of, range(EXAMPLES))
        self.bad = sorted(chance.sample(range(EXAMPLES), chance.randint(1, EXAMPLES - 1)))
        for i in self.bad:
            self.x[i, chance.randrange(WIDTH)] = chance.choice(BAD)
        self.microbatch = chance.choice((1, 5, EXAMPLES))

    def _losses_of(self, rows: Sequence[int]) -> Tensor:
        x, y = self.x[list(rows)], self.y[list(rows)]
        return F.cross_entropy(self.model(x), y, reduction="none")

    def sums(self, examples: list[int]) -> list[Tensor]:
        """The groups' sums over these examples, K tensors (d_k,), in float64."""
        self.model.zero_grad()
        self.engine.reset()
        for start in range(0, len(examples), self.microbatch):
            rows = examples[start : start + self.microbatch]
            self.engine.clip(self._losses_of, rows)
        return [
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group.parameters]
            ).double()
            for group in self.engine.groups
        ]

    def left_out(self, example: int) -> Tensor:
        """For each group, whether the norm of this example is not finite, (K,)."""
        self.sums([example])
        return ~self.engine.per_example_norms[:, 0].isfinite()


def sound(case: Case) -> bool:
    """Whether the sum is finite, each example adds at most C_k to group k, and nothing if its norm is not finite.

    A NaN reaches all groups. An infinite input need not, as tanh(inf) is 1.
    """
    examples = list(range(EXAMPLES))
    sums = case.sums(examples)
    counted = case.engine.nonfinite
    good = all(bool(total.isfinite().all()) for total in sums)
    out = torch.stack([case.left_out(i) for i in examples])  # (n, K)
    good &= counted == int(out.sum(0).max()) and counted > 0
    good &= all(bool(out[i].all()) for i in case.bad if case.x[i].isnan().any())
    for i in examples:
        without = case.sums([j for j in examples if j != i])
        moved = torch.stack([(a - b).norm() for a, b in zip(sums, without, strict=True)])
        good &= bool((moved <= case.thresholds * (1 + 1e-5) + 1e-5).all())
        good &= float(moved.norm()) <= float(case.thresholds.norm()) * (1 + 1e-5) + 1e-5
        good &= bool((moved[out[i]] <= 1e-5).all())
    return good


def not_finite(trials: int, seed: int = 12) -> Outcome:
    """NaN, infinite and overflowing examples among good ones, in every mode."""
    chance, lost = random.Random(seed), 0
    for trial in range(trials):
        case = Case(MODES[trial % len(MODES)], chance)
        lost += not sound(case)
        case.engine.detach()
    result = "nothing added to a group where the norm is not finite; counted; nobody moves group k by more than C_k"
    return Outcome("NaN, inf and overflowing examples", trials, lost, result)
