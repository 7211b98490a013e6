"""Clipped sums and counts under FSDP2 on two processes match those of one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from groupwise.clipping import attach, flat, per_layer
from groupwise.errors import UserError
from tests.clipping.test_in_flight import Model
from tests.clipping.test_language_models import make_case
from tests.pipeline.ranks import run_ranks

WORLD, EXAMPLES, LENGTH, THRESHOLD = 2, 7, 6, 0.3
RTOL = 1e-9


class Logits(nn.Module):
    """A causal language model that returns only logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, position_ids=torch.arange(LENGTH).expand_as(ids)).logits


def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name.startswith("mlp"):
        model: nn.Module = Model().double()
        model.checkpoints = name == "mlp_checkpointed"
        return model
    return Logits(make_case(name).model.train())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded separately: blocks, or single linear layers."""
    if isinstance(model, Model):
        return [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [module for name, module in model.named_modules() if name.split(".")[-2:-1] == ["h"]]


def losses_of(model: nn.Module, rows: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 11, (EXAMPLES, LENGTH), generator=generator)[rows]
    logits = model(ids)
    weights = torch.logspace(-4, 1, EXAMPLES, dtype=torch.float64)[rows]
    return weights * F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


def clip(engine: Any, model: nn.Module, rows: range, microbatch: int = 2) -> None:
    engine.trace(partial(losses_of, model), range(EXAMPLES))
    for start in range(rows.start, rows.stop, microbatch):
        engine.clip(partial(losses_of, model), range(start, min(start + microbatch, rows.stop)))


MODES = {"layer": (per_layer, "bookkeeping"), "ghost": (flat, "ghost")}
SHARES = (range(4), range(4, 7))
"""Shares of unequal size but with the same number of microbatches; otherwise a process would wait for the other."""


def one_process(name: str, mode: str) -> tuple[dict[str, Tensor], Tensor]:
    model = make_model(name)
    make_partition, norms = MODES[mode]
    with attach(model, make_partition(model), THRESHOLD, norms=norms) as engine:
        clip(engine, model, range(EXAMPLES))
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, engine.counts


def sharded(name: str, mode: str, attach_first: bool, rank: int) -> tuple[dict[str, Tensor], list[float]]:
    """Sums and counts with FSDP2, which shards the blocks and the rest and averages gradients."""
    model = make_model(name)
    make_partition, norms = MODES[mode]
    partition = make_partition(model)
    engine = attach(model, partition, THRESHOLD, norms=norms, direct=True) if attach_first else None
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    if engine is None:
        with pytest.raises(UserError, match=r"is in shards \(fully_shard\): attach with direct=True"):
            attach(model, partition, THRESHOLD, norms=norms)
        engine = attach(model, partition, THRESHOLD, norms=norms, direct=True)
    with engine:
        clip(engine, model, SHARES[rank])
        assert all(type(group.threshold) is Tensor for group in engine.groups)
        assert all(hasattr(p, "placements") for group in engine.groups for p in group.parameters)
        gradients = {k: WORLD * p.grad.full_tensor() for k, p in model.named_parameters() if p.grad is not None}
        dist.all_reduce(counts := engine.counts)
        return gradients, counts.tolist()


CASES = [
    ("mlp", "layer", True),
    ("mlp", "layer", False),
    ("mlp", "ghost", True),
    ("mlp", "ghost", False),
    ("mlp_checkpointed", "layer", True),
    ("mlp_checkpointed", "ghost", False),
    ("gpt2_untied", "layer", False),
    ("gpt2_untied", "ghost", True),
    ("gpt2_lora", "layer", True),
    ("gpt2_lora", "ghost", False),
]
"""Model, mode, and whether the engine attaches before the model is sharded."""


def run_all(rank: int, world: int) -> dict[Any, tuple[dict[str, Tensor], list[float]]]:
    return {case: sharded(*case, rank) for case in CASES}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """One pair of processes for all cases."""
    return run_ranks(run_all, WORLD)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_sums_and_counts_match_one_process(results, case):
    expected, counts = one_process(*case[:2])
    assert 0 < float(counts.sum()) < EXAMPLES * len(counts)
    for gradients, found in (process[case] for process in results):
        assert found == counts.tolist() and gradients.keys() == expected.keys()
        for key, gradient in expected.items():
            assert float((gradients[key] - gradient).norm()) <= RTOL * float(gradient.norm()) + 1e-14, key
