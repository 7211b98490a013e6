"""Several microbatches between their forward and backward passes (pipelines): each is clipped as if it were alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import ClippingEngine, attach, clip_factors, flat, per_block, per_layer
from groupwise.clipping.partition import Partition
from groupwise.clipping.reference import Reference, clipped_sums
from groupwise.errors import UserError
from tests.clipping.alone import assert_equal, gradients, looped, middle_thresholds
from tests.combinations import pairs_fast

SIZES = (4, 3, 5)


class Block(nn.Module):
    """A residual block with a normalisation; with `twice` its middle layer runs twice."""

    def __init__(self, width: int, twice: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.norm(x)))
        return x + self.outer(torch.tanh(self.inner(h)) if self.twice else h)


class Model(nn.Module):
    """Token ids (B, T) to logits (B, T, 11): embedding, three blocks and a head."""

    def __init__(self, *, tied: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6, twice) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.checkpoints = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


@dataclass
class Run:
    """A model and the examples of three microbatches."""

    model: Model
    ids: list[Tensor]
    weights: list[Tensor]

    def output(self, m: int) -> Tensor:
        return self.model(self.ids[m])

    def losses_of(self, output: Tensor, m: int, rows=slice(None)) -> Tensor:
        """The end of the pipeline, outside the model: (B,)."""
        labels = self.ids[m][rows, 1:]
        return self.weights[m][rows] * F.cross_entropy(output[:, :-1].mT, labels, reduction="none").sum(1)

    def losses(self, rows: list[int]) -> Tensor:
        """The losses of some examples of the first microbatch."""
        return self.losses_of(self.model(self.ids[0][rows]), 0, rows)

    def loss_of(self, example: int) -> Tensor:
        """The loss of one example alone; examples of all microbatches are numbered in order, without fillers."""
        rows = [(m, i) for m in range(3) for i in range(len(self.ids[m])) if self.weights[m][i] > 0]
        m, i = rows[example]
        ids = self.ids[m][i : i + 1]
        output = self.model(ids)
        return self.weights[m][i] * F.cross_entropy(output[0, :-1], ids[0, 1:], reduction="sum")

    @property
    def examples(self) -> int:
        return sum(int((weights > 0).sum()) for weights in self.weights)


def make_run(fillers: int = 0, **options: bool) -> Run:
    model = Model(**options)
    ids = [torch.randint(0, 11, (size, 7)) for size in SIZES]
    weights = [torch.logspace(-1, 1, size) for size in SIZES]
    if fillers:
        ids[2][-fillers:] = ids[2][:1]
        weights[2][-fillers:] = 0
    return Run(model, ids, weights)


@pytest.fixture
def make(double) -> Callable[..., Run]:
    return make_run


def attach_traced(run: Run, partition: Partition, thresholds: list[float] | float, **options: Any) -> ClippingEngine:
    engine = attach(run.model, partition, thresholds, **options)
    engine.trace(run.losses, range(SIZES[0]))
    return engine


def run_forward(engine: ClippingEngine, run: Run, m: int) -> Tensor:
    with engine.forward(len(run.ids[m]), microbatch=m):
        return run.output(m)


def run_alone(engine: ClippingEngine, run: Run, m: int) -> None:
    """Run forward and backward without another microbatch in between."""
    with engine.forward(SIZES[m]):
        losses = run.losses_of(run.output(m), m)
    engine.backward(losses)


def run_backward(run: Run, output: Tensor, m: int) -> None:
    """Run backward as a middle stage of a pipeline does: from output gradients that it receives."""
    received = output.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(run.losses_of(received, m).sum(), received)
    torch.autograd.backward(output, gradient)


ORDERS = {
    "gpipe": ["f0", "f1", "f2", "b0", "b1", "b2"],
    "1f1b": ["f0", "f1", "b0", "f2", "b1", "b2"],
    "last first": ["f0", "f1", "f2", "b2", "b0", "b1"],
}
KINDS = {"plain": {}, "tied": {"tied": True}, "twice": {"twice": True}}


PARTITIONS = {"flat": flat, "layer": per_layer, "block": per_block}


@cache
def truth_of(grouping: str, kind: str) -> tuple[list[float], Reference]:
    """Thresholds and the reference at them, cached for all orders."""
    torch.manual_seed(0)  # as in the fixture
    run = make_run(fillers=2, **KINDS[kind])
    partition = PARTITIONS[grouping](run.model)
    loss_of = looped(run.model, run.loss_of, range(run.examples))
    thresholds = middle_thresholds(run.model, loss_of, partition, range(run.examples))
    return thresholds, clipped_sums(run.model, loss_of, range(run.examples), partition, thresholds)


@pytest.mark.parametrize(
    ("grouping", "kind", "activations", "order", "direct"),
    [
        *pairs_fast(product(PARTITIONS, KINDS, ["stored", "checkpointed"], ORDERS, [False])),
        *product(["layer"], ["plain"], ["stored"], ORDERS, [True]),
    ],
)
def test_any_order_of_passes_matches_the_reference(make, grouping, kind, activations, order, direct):
    thresholds, truth = truth_of(grouping, kind)
    torch.manual_seed(0)
    run = make(fillers=2, **KINDS[kind])
    partition = PARTITIONS[grouping](run.model)
    run.model.checkpoints = activations == "checkpointed"
    outputs: dict[int, Tensor] = {}
    norms: dict[int, Tensor] = {}
    with attach_traced(run, partition, thresholds, direct=direct) as engine:
        for event in ORDERS[order]:
            m = int(event[1])
            if event[0] == "f":
                outputs[m] = run_forward(engine, run, m)
                continue
            engine.check_output(outputs[m])
            with engine.backward_of(m, absent=2 if m == 2 else 0):
                run_backward(run, outputs.pop(m), m)
            norms[m] = engine.per_example_norms
    assert engine.examples == run.examples == 10
    torch.testing.assert_close(torch.cat([norms[m] for m in range(3)], 1), truth.norms, rtol=1e-7, atol=1e-9)
    assert torch.equal(engine.counts, truth.counts)
    assert_equal(gradients(run.model), truth.sums)


@pytest.mark.parametrize(
    ("norms", "kind", "direct"), [*product(["bookkeeping", "ghost"], KINDS, [False]), ("ghost", "plain", True)]
)
def test_norms_then_sums_are_flat_clipping(make, norms, kind, direct):
    """Two pipeline passes: first the norms of all microbatches, then the sums with the factors."""
    run = make(fillers=1, **KINDS[kind])
    partition = flat(run.model)
    (threshold,) = thresholds = middle_thresholds(run.model, run.loss_of, partition, range(run.examples))
    truth = clipped_sums(run.model, run.loss_of, range(run.examples), partition, thresholds)
    with attach_traced(run, partition, thresholds, norms=norms, direct=direct) as engine:
        outputs = [run_forward(engine, run, m) for m in range(3)]
        squares = {}
        for m in (1, 0, 2):
            with engine.norms_of(m):
                run_backward(run, outputs[m], m)
            squares[m] = engine.squared_norms[0]
        assert all(p.grad is None for p in run.model.parameters())
        assert engine.examples == 0
        whole = torch.cat([squares[m] for m in range(3)])
        present = whole[:-1]
        torch.testing.assert_close(present.sqrt(), truth.norms[0], rtol=1e-7, atol=0)
        assert float(whole[-1]) == 0
        engine.count_norms(present[None])
        factors = engine.factors(whole)
        torch.testing.assert_close(factors[:-1], clip_factors(truth.norms[0], torch.tensor(threshold)))
        for m, part in enumerate(factors.split(SIZES)):
            output = run_forward(engine, run, m)
            with engine.sums_of(m, part):
                run.losses_of(output, m).sum().backward()
    assert_equal(gradients(run.model), truth.sums)
    assert torch.equal(engine.counts, truth.counts)
    assert engine.examples == run.examples


@pytest.mark.parametrize(
    ("make_partition", "begin"), [(flat, "sums_of"), (flat, "backward_of"), (per_layer, "backward_of")]
)
def test_a_backward_pass_that_misses_parameters_is_refused(make, make_partition, begin):
    run = make()
    run.model.add_module("spare", nn.Linear(3, 3))
    with attach_traced(run, make_partition(run.model), 1.0) as engine:
        output = run_forward(engine, run, 0)
        with pytest.raises(UserError, match=r"'spare\.(weight|bias)'"), getattr(engine, begin)(0):
            run_backward(run, output, 0)


def test_microbatch_names_can_be_reused_and_reset_forgets_them(make):
    run = make()
    with attach_traced(run, flat(run.model), 0.5) as engine:
        for _ in range(2):
            output = run_forward(engine, run, 0)
            with engine.backward_of(0):
                run_backward(run, output, 0)
        assert engine.examples == 8
        run_forward(engine, run, 1)
        engine.reset()
        with pytest.raises(UserError, match="No forward pass of microbatch 1 waits"), engine.backward_of(1):
            pass


def test_a_second_forward_pass_of_a_microbatch_replaces_the_first(make):
    run = make()
    with attach_traced(run, flat(run.model), 0.5) as engine:
        first, _ = run_forward(engine, run, 0), run_forward(engine, run, 0)
        with pytest.raises(UserError, match="forward in another microbatch"), engine.backward_of(0):
            run_backward(run, first, 0)
        run_forward(engine, run, 0)
        output = run_forward(engine, run, 0)
        with engine.backward_of(0):
            run_backward(run, output, 0)
        assert engine.examples == 4


def test_other_passes_in_between_do_not_change_the_sums(make):
    run = make()
    with attach_traced(run, flat(run.model), 0.5) as engine:
        run_alone(engine, run, 0)
        expected = gradients(run.model)
        run.model.zero_grad()
        output = run_forward(engine, run, 0)
        run.output(1)
        with engine.forward(SIZES[1]):
            run.output(1)
        with torch.no_grad():
            run.output(2)
        with engine.uncounted():
            run_alone(engine, run, 1)
        run.model.zero_grad()
        with engine.backward_of(0):
            run_backward(run, output, 0)
    assert_equal(gradients(run.model), expected, rtol=1e-12)


def back(engine: ClippingEngine, run: Run, m: int, output: Tensor | None = None) -> None:
    """The backward pass of a microbatch, without any gradient if `output` is None."""
    with engine.backward_of(m):
        if output is not None:
            run_backward(run, output, m)


def finished(engine: ClippingEngine, run: Run) -> None:
    output = run_forward(engine, run, 0)
    back(engine, run, 0, output)
    back(engine, run, 0)


def without_gradients(engine: ClippingEngine, run: Run) -> None:
    with torch.no_grad():
        run_forward(engine, run, 0)
    back(engine, run, 0)


def nested(outer: str, inner: str) -> Callable[[ClippingEngine, Run], None]:
    """A misuse: the method `inner` inside the method `outer`."""

    def begin(engine: ClippingEngine, run: Run) -> None:
        run_forward(engine, run, 0), run_forward(engine, run, 1)
        given = {"forward": (4, 0), "backward": (torch.ones(5, requires_grad=True),)}
        with getattr(engine, outer)(*given.get(outer, (0,))):
            if inner == "backward":
                engine.backward(*given[inner])
            with getattr(engine, inner)(*given.get(inner, (1,))):
                pass

    return begin


def another_microbatch(engine: ClippingEngine, run: Run) -> None:
    first = run_forward(engine, run, 0)
    run.ids[1] = run.ids[0]
    run_forward(engine, run, 1)
    with engine.backward_of(1):
        run_backward(run, first, 0)


def another_batch_size(engine: ClippingEngine, run: Run) -> None:
    with engine.forward(3, "a"):
        run.output(0)


MISUSES: dict[str, tuple[Callable[[ClippingEngine, Run], Any], str]] = {
    "unknown": (lambda engine, run: back(engine, run, 5), "No forward pass of microbatch 5 waits"),
    "finished": (finished, "No forward pass of microbatch 0 waits"),
    "without gradients": (without_gradients, "with gradients enabled"),
    "backward in backward": (nested("backward_of", "backward_of"), "begun inside another one"),
    "plain backward in norms": (nested("norms_of", "backward"), "begun inside another one"),
    "forward in forward": (nested("forward", "forward"), "begun inside another pass"),
    "forward in backward": (nested("backward_of", "forward"), "begun inside another pass"),
    "another batch size": (another_batch_size, r"\(4, 7\) in its call 1 of a batch of 3 examples"),
    "another microbatch's output": (another_microbatch, "forward in another microbatch"),
    "plain backward": (
        lambda engine, run: run_backward(run, run_forward(engine, run, 0), 0),
        r"compute gradients themselves \(backward",
    ),
    "no output": (lambda engine, run: (run_forward(engine, run, 0), back(engine, run, 0)), "reach no layer of group"),
    "other groups' norms": (lambda engine, _: engine.count_norms(torch.ones(99, 4)), "one row per group"),
}


@pytest.mark.parametrize("make_partition", [flat, per_layer])
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_leaves_the_engine_usable(make, name, make_partition):
    run, (misuse, sentence) = make(), MISUSES[name]
    with attach_traced(run, make_partition(run.model), 0.5) as engine:
        with pytest.raises(UserError, match=sentence):
            misuse(engine, run)
        assert name == "finished" or all(p.grad is None for p in run.model.parameters())
        back(engine, run, 0, run_forward(engine, run, 0))
        assert engine.examples == (8 if name == "finished" else 4)


def test_two_passes_need_one_group_and_ghost_clipping_needs_two_passes(make):
    run = make()
    with attach_traced(run, per_layer(run.model), 1.0) as engine:
        run_forward(engine, run, 1)
        with pytest.raises(UserError, match="is for one group"), engine.sums_of(1):
            pass
    with attach_traced(run, flat(run.model), 0.5, norms="ghost") as engine:
        run_forward(engine, run, 0)
        with pytest.raises(UserError, match="norms_of, then sums_of"), engine.backward_of(0):
            pass
