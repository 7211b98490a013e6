"""On two processes: the engine in replicas, and inside FSDP2, gives the clipped sums and counts of one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import attach, flat, per_layer
from groupwise.errors import UserError
from tests.clipping.test_language_models import VOCABULARY, make_case
from tests.pipeline.ranks import run_ranks

WORLD, EXAMPLES, LENGTH, THRESHOLD = 2, 7, 6, 0.3
RTOL = 1e-9


class Mlp(nn.Module):
    """(B, T) ids to logits: embedding, four linear layers, a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY)
        self.remakes = False

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.remakes else block(x))
        return self.head(self.norm(x))


class Logits(nn.Module):
    """A causal language model that returns nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, position_ids=position_ids).logits


def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name.startswith("mlp"):
        model: nn.Module = Mlp().double()
        model.remakes = name == "mlp_remakes"
        return model
    return Logits(make_case(name).model.train())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded on their own: blocks, or the MLP's single layers."""
    if isinstance(model, Mlp):
        return [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [module for name, module in model.named_modules() if name.split(".")[-2:-1] == ["h"]]


def losses_of(model: nn.Module, rows: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)[rows]
    logits = model(ids, torch.arange(LENGTH).expand_as(ids))
    weights = torch.logspace(-4, 1, EXAMPLES, dtype=torch.float64)[rows]
    return weights * F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


def clip(engine: Any, model: nn.Module, rows: range, microbatch: int = 2) -> None:
    engine.trace(partial(losses_of, model), range(EXAMPLES))
    for start in range(rows.start, rows.stop, microbatch):
        engine.clip(partial(losses_of, model), range(start, min(start + microbatch, rows.stop)))


MODES = {"layer": (per_layer, "bookkeeping"), "flat": (flat, "bookkeeping"), "ghost": (flat, "ghost")}
SHARES = (range(4), range(4, 7))
"""Uneven shares, of as many microbatches: a replica with fewer would make the others wait."""


def one_process(name: str, mode: str) -> tuple[dict[str, Tensor], Tensor]:
    model = make_model(name)
    make_partition, norms = MODES[mode]
    with attach(model, make_partition(model), THRESHOLD, norms=norms) as engine:
        clip(engine, model, range(EXAMPLES))
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, engine.counts


def counted(engine: Any) -> list[float]:
    counts = engine.counts
    dist.all_reduce(counts)
    return counts.tolist()


def replicated(name: str, mode: str, rank: int, attach_first: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Replicas, whose clipped sums are added up."""
    model = make_model(name)
    make_partition, norms = MODES[mode]
    with attach(model, make_partition(model), THRESHOLD, norms=norms) as engine:
        clip(engine, model, SHARES[rank])
        sums = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        for total in sums.values():
            dist.all_reduce(total)
        return sums, counted(engine)


def sharded(name: str, mode: str, rank: int, attach_first: bool) -> tuple[dict[str, Tensor], list[float]]:
    """FSDP2: blocks and the rest in shards, which averages too."""
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
        return gradients, counted(engine)


PRODUCT = [
    (wrap, name, mode, attach_first)
    for wrap, modes in ((replicated, ("layer", "flat", "ghost")), (sharded, ("layer", "ghost")))
    for name in ("mlp", "mlp_remakes", "gpt2_untied", "gpt2_lora")
    for mode in modes
    for attach_first in ((True, False) if wrap is sharded else (True,))
]
FIRST = {"mlp_remakes": "layer", "gpt2_untied": "ghost", "gpt2_lora": "layer"}
"""The mode in which a model is attached to before it is sharded; in the other it is after."""
CASES = [
    case for case in PRODUCT if case[0] is replicated or case[1] == "mlp" or (case[2] == FIRST[case[1]]) == case[3]
]
REST = [case for case in PRODUCT if case not in CASES]


def run_all(rank: int, world: int, cases: list[Any]) -> dict[Any, tuple[dict[str, Tensor], list[float]]]:
    return {(wrap, *rest): wrap(rest[0], rest[1], rank, rest[2]) for wrap, *rest in cases}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """One pair of processes for all cases."""
    return run_ranks(run_all, WORLD, CASES)


@pytest.fixture(scope="module")
def others() -> list[Any]:
    return run_ranks(run_all, WORLD, REST)


def called(case: Any) -> str:
    return "-".join(map(str, (case[0].__name__, *case[1:])))


@pytest.mark.parametrize("case", CASES, ids=called)
def test_sums_and_counts_are_those_of_one_process(results, case):
    _equal(results, case)


@pytest.mark.slow  # either order of attaching and sharding, in both modes of every model
@pytest.mark.parametrize("case", REST, ids=called)
def test_so_are_they_in_the_other_order(others, case):
    _equal(others, case)


def _equal(results: list[Any], case: Any) -> None:
    _, name, mode, _ = case
    expected, counts = one_process(name, mode)
    assert 0 < float(counts.sum()) < EXAMPLES * len(counts)
    for rank in range(WORLD):
        gradients, found = results[rank][case]
        assert found == counts.tolist()
        assert gradients.keys() == expected.keys()
        for key, gradient in expected.items():
            assert float((gradients[key] - gradient).norm()) <= RTOL * float(gradient.norm()) + 1e-14, key


def test_a_wrapped_model_is_referred_to_what_it_wraps():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"wrapped in DataParallel, .* attach to model.module"):
        attach(DataParallel(model), flat(model), 1.0)
