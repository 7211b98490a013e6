"""The check before training (`verify`) refuses unsound models by name, and leaves model and engine unchanged."""

import random
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, automatic_factors, flat, per_layer, verify
from groupwise.clipping.norm_terms import squares_together
from groupwise.clipping.rules.linear import LinearRule
from groupwise.errors import UserError
from tests.clipping.conftest import Lambda
from tests.clipping.test_trace import Two
from tests.clipping.traced import clip

EXAMPLES = [0, 3, 5, 2, 7]
no_rule = pytest.mark.filterwarnings("ignore:groupwise has no rule")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Scaled(nn.Module):
    """x·w·number(), a module without a rule."""

    def __init__(self, number: Callable[[], object]) -> None:
        super().__init__()
        self.w, self.number = nn.Parameter(torch.ones(5)), number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.number()


class LayerDrop(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(5, 5), rate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * (torch.rand(()) >= self.rate)


class Codebook(nn.Module):
    """Updates a running mean, which the output does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 4:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def attached(*layers: nn.Module, partition=per_layer, threshold=0.05):
    model = nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 2))
    x = torch.randn(8, 4)
    return attach(model, partition(model), threshold), lambda examples: model(x[list(examples)]).square().sum(1)


def reordered(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """The second layer gets the rows in another order; the original order is restored after it."""
    x = a(x)
    order = x[:, 0].argsort()
    return b(x[order])[order.argsort()]


def across_the_batch(x: Tensor) -> Tensor:
    """Attention over the batch axis, as when batch_first is forgotten."""
    return F.scaled_dot_product_attention(x, x, x)


def batch_statistics(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def mixup_by_sorting(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.rand(len(x)).argsort()]


def one_mask(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x[0]), 0.5) * x


def sometimes_cut_off(x: Tensor) -> Tensor:
    """Detach the whole batch with probability 1/2."""
    return x.detach() if torch.rand(()) < 0.5 else x


class Leaks(torch.autograd.Function):
    """The identity, whose backward pass adds a share of all examples' gradients to each."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + ctx.share * g.sum(0), None


def scaled_together(x: Tensor) -> Tensor:
    """Scale down the gradients of the whole batch together if their norm is large."""
    x = x.clone()
    x.register_hook(lambda g: g * min(1.0, 100 / float(g.norm())))
    return x


FAULTS = {
    "batch statistics": (lambda: Lambda(batch_statistics), r"mixes the examples.*the output of layer '1' \(Lambda\)"),
    "the batch's mean": (lambda: Lambda(lambda x: x - x.mean(0)), "mixes the examples.*the output of layer '1'"),
    "divided by the batch size": (lambda: Lambda(lambda x: x / len(x)), "alone but.*mixes the examples.*layer '1'"),
    "random numbers of a given generator": (
        lambda: Lambda(lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(5))),
        r"torch.rand draws in layer '1' \(Lambda\) from a generator that is passed to it",
    ),
    "the forty largest values": (
        lambda: Lambda(
            lambda x: torch.where(x >= x.flatten().topk(min(40, x.numel())).values.min(), x, x.detach() * 0.5)
        ),
        "in one batch and|alone but",
    ),
    "rolled if more than ten": (
        lambda: Lambda(lambda x: x if len(x) <= 10 else 0.9 * x + 0.1 * x.roll(5, 0)),
        "alone but .* in a batch: a layer or the loss mixes the examples",
    ),
    "attention over the batch": (lambda: Lambda(across_the_batch), r"mixes the examples.*layer '1' \(Lambda\)"),
    "mixup": (lambda: Lambda(mixup), r"torch.randperm draws .*in layer '1' \(Lambda\)"),
    "mixup by sorting": (lambda: Lambda(mixup_by_sorting), "mixes the examples.*the output of layer '1'"),
    "reordered rows": (
        lambda: Two(reordered),
        r"(the input of layer|Layer) '1\.b' .*reordered|reordered.*layer '1\.b'",
    ),
    "layer drop": (LayerDrop, r"torch.rand draws numbers of shape \(\) in layer '1' \(LayerDrop\) for 2 examples"),
    "gradients cut off": (
        lambda: Lambda(sometimes_cut_off),
        r"torch.rand draws numbers of shape \(\) in layer '1' \(Lambda\) for 2 examples",
    ),
    "one mask for all": (lambda: Lambda(one_mask), r"torch.bernoulli draws numbers of shape \(5,\) in layer '1'"),
    "python": (lambda: Scaled(random.random), r"Numbers from random are drawn in layer '1' \(Scaled\)"),
    "numpy": (lambda: Scaled(np.random.rand), r"Numbers from numpy.random are drawn in layer '1' \(Scaled\)"),
    "python, no parameters": (lambda: Lambda(lambda x: x * random.random()), r"from random .* layer '1' \(Lambda\)"),
    "python, by row": (
        lambda: Lambda(lambda x: x * torch.tensor([[random.random()] for _ in x])),
        "Numbers from random are drawn in layer '1'",
    ),
    "numpy, own generator": (
        lambda: Scaled(np.random.default_rng(0).random),
        r"other losses when it runs again.*the output of layer '1' \(Scaled\)",
    ),
    "side effects": (lambda: Scaled(count(1).__next__), r"other losses when it runs again.*layer '1' \(Scaled\)"),
    "codebook": (Codebook, "Buffer '1.mean' changes"),
    "power iteration": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
        r"Buffer '1\.parametrizations.*_[uv]' changes",
    ),
}


@no_rule
@pytest.mark.parametrize("rows", [5, 2])
@pytest.mark.parametrize("partition", [flat, per_layer])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_name(fault, partition, rows):
    make, message = FAULTS[fault]
    if rows == 2 and fault == "mixup by sorting":
        pytest.skip("half of all orders of two rows are the original order")
    engine, losses_of = attached(make(), partition=partition)
    with pytest.raises(UserError, match=message):
        verify(engine, losses_of, EXAMPLES, rows=rows)


@no_rule
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_trace_or_verify(fault):
    engine, losses_of = attached(FAULTS[fault][0]())
    with pytest.raises(UserError, match=r"'[12](\.|')|alone but"):
        engine.trace(losses_of, range(6))
        verify(engine, losses_of, EXAMPLES)


@pytest.mark.parametrize("threshold", [1e-3, 0.05, 1e6])
@pytest.mark.parametrize("partition", [flat, per_layer])
def test_understated_norms_are_refused_even_if_nothing_is_clipped(monkeypatch, partition, threshold):
    original = LinearRule.squared_norms
    monkeypatch.setattr(LinearRule, "squared_norms", lambda *given: squares_together([[original(*given)]])[0] / 100)
    engine, losses_of = attached(nn.Tanh(), partition=partition, threshold=threshold)
    name = "'0', '2'" if partition is flat else "'[02]'"
    with pytest.raises(UserError, match=rf"The gradient norm of example 0 in group .*\(of {name}\)"):
        verify(engine, losses_of, EXAMPLES)


@pytest.mark.parametrize(("error", "refused"), [(0.04, False), (0.06, True)])
def test_a_clipped_sum_may_be_off_by_five_percent(monkeypatch, error, refused):
    original = LinearRule.weighted_sum

    def off(self, *args, **context):
        weight, bias = original(self, *args, **context)
        return weight * (1 + error), bias

    monkeypatch.setattr(LinearRule, "weighted_sum", off)
    model, x = nn.Linear(4, 3, bias=False), torch.randn(8, 4)
    with attach(model, per_layer(model), 0.05) as engine:
        if refused:  # one example's clipped sum has the threshold as its norm
            with pytest.raises(UserError, match="parameter 'weight' is off by 6"):
                verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [3])
        else:
            found = verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [3])
            assert found == pytest.approx(error, rel=1e-2)


@pytest.mark.parametrize(
    ("alone", "together", "refused"),
    [(0.5, 0.5004, False), (0.5, 0.5006, True), (50.0, 50.049, False), (50.0, 50.051, True), (1e-3, 1.09e-3, False)],
)
def test_a_loss_may_differ_by_a_thousandth_in_a_batch(alone, together, refused):
    engine, losses_of = attached(nn.Tanh())

    def losses(examples):
        own = losses_of(examples)
        return own - own.detach() + (alone if len(examples) == 1 else together)

    if refused:
        with pytest.raises(UserError, match=r"Example 0 has loss .* alone but"):
            verify(engine, losses, EXAMPLES)
    else:
        verify(engine, losses, EXAMPLES)


def states():
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]


@pytest.mark.parametrize("fault", [None, Lambda(mixup), Codebook(), Scaled(random.random), Scaled(np.random.rand)])
@no_rule
def test_model_engine_and_generators_are_restored(fault):
    noise = Lambda(lambda x: x + torch.rand(x.shape))
    frozen = nn.Sequential(Codebook().eval())  # stays in eval mode
    engine, losses_of = attached(nn.Dropout(0.5), frozen, noise, *([] if fault is None else [fault]))
    model = engine.model
    model[1].eval()
    engine.set_thresholds(0.25, [0.5] * len(engine.groups))
    for _ in range(2):
        clip(engine, losses_of, [0])
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    for parameter, _ in parameters:
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter, _ in parameters]
    random.seed(1), np.random.seed(1)
    before, counts, norms = states(), engine.counts, engine.per_example_norms
    if fault is None:
        assert verify(engine, losses_of, EXAMPLES) < 1e-4
    else:
        with pytest.raises(UserError):
            verify(engine, losses_of, EXAMPLES)
    assert states() == before
    assert engine.examples == 2 and torch.equal(engine.counts, counts)
    assert torch.equal(engine.per_example_norms, norms)
    assert engine.thresholds.tolist() == [0.25] * len(engine.groups)
    assert engine.count_thresholds.tolist() == [0.5] * len(engine.groups)
    assert model.training and not model[1].training and model[2].training and not model[2][0].training
    assert list(model.buffers()) == [] or all(
        now is b and torch.equal(b, value) for now, (b, value) in zip(model.buffers(), buffers, strict=True)
    )
    for (parameter, value), gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient and bool((gradient == 1).all()) and torch.equal(parameter, value)
    clip(engine, losses_of, [2])  # and it still works


class MixesInEval(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(0))


def test_a_model_in_eval_mode_is_checked_in_that_mode():
    engine, losses_of = attached(Codebook())
    engine.model.eval()
    verify(engine, losses_of, EXAMPLES)
    assert not any(module.training for module in engine.model.modules())
    engine, losses_of = attached(MixesInEval(5, 5))
    verify(engine, losses_of, EXAMPLES)
    engine, losses_of = attached(MixesInEval(5, 5))
    engine.model.eval()
    with pytest.raises(UserError, match="mix"):
        verify(engine, losses_of, EXAMPLES)


@pytest.mark.parametrize("mixing", [lambda x: Leaks.apply(x, 1e-3), scaled_together])
@pytest.mark.parametrize("partition", [flat, per_layer])
def test_mixing_in_the_backward_pass_is_refused(mixing, partition):
    with pytest.raises(UserError, match="by a loop over single examples"):
        verify(*attached(Lambda(mixing), partition=partition), EXAMPLES)
    verify(*attached(Lambda(lambda x: Leaks.apply(x, 0.0)), partition=partition), EXAMPLES)


def test_layer_drop_passes_only_at_rate_0():
    verify(*attached(LayerDrop(0.0)), EXAMPLES)
    for rate in (0.001, 0.999, 1.0 - 2**-20):
        with pytest.raises(UserError, match="LayerDrop"):
            verify(*attached(LayerDrop(rate)), EXAMPLES)


def test_losses_may_augment_examples_one_by_one():
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(8, 4)

    def losses(examples, draw):
        rows = torch.stack([x[i] + float(draw()) for i in examples])
        return model(rows).square().sum(1)

    draws = [random.random, np.random.rand, lambda: torch.rand(()), lambda: torch.poisson(torch.tensor(2.0))]
    for draw in draws:
        with attach(model, per_layer(model), 0.05) as engine:
            verify(engine, lambda examples, draw=draw: losses(examples, draw), EXAMPLES)
    with attach(model, per_layer(model), 0.05) as engine:
        with pytest.raises(UserError, match="from random are drawn in the loss, outside"):
            verify(engine, lambda examples: losses(examples, float) * random.random(), EXAMPLES)
        with pytest.raises(UserError, match=r"torch.rand draws .* in the loss, outside"):
            verify(engine, lambda examples: losses(examples, float) * torch.rand(()), EXAMPLES)


def test_draws_without_losses_at_their_expectation_are_not_replaced():
    """There ``torch.rand(x.shape) < 0.15`` masks no entry, so all losses would be 0 or NaN."""
    x = torch.randn(8, 40)

    def verified(least, mix=lambda h: h, scale=1.0):
        model = nn.Sequential(nn.Linear(40, 40), Lambda(mix))

        def losses(examples):
            rows = x[list(examples)]
            masked = (torch.rand(rows.shape) < 0.15).float()
            errors = (model(rows * (1 - masked)) - rows).square() * masked * scale
            return errors.sum(1) / masked.sum(1).clamp_min(least)

        with attach(model, flat(model), 0.05) as engine, pytest.warns(UserWarning, match="compared within their batch"):
            return verify(engine, losses, EXAMPLES)

    assert max(verified(0), verified(1)) < 1e-4
    with pytest.raises(UserError, match="by a loop over single examples"):
        verified(1, scaled_together)
    with pytest.raises(UserError, match="a gradient other than 0"):
        verified(1, scale=0.0)


def test_other_clip_rules_are_verified_too():
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    with attach(model, per_layer(model), 0.05, clip_rule=automatic_factors(0.5)) as engine:
        assert verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), [0, 1, 2]) < 1e-4


def test_verify_runs_few_examples():
    """The cost is the number of rows in forward passes, for any model."""
    engine, losses_of = attached(nn.Dropout(0.1))
    engine.trace(losses_of, EXAMPLES)
    rows, rows_in_memory = [], []

    def counted(examples):
        rows.append(len(examples))
        rows_in_memory.append(len(examples) * torch.is_grad_enabled())  # these keep activations
        return losses_of(examples)

    verify(engine, counted, EXAMPLES)
    assert sum(rows) <= 86 and max(rows) == 64
    rows.clear(), rows_in_memory.clear()
    verify(engine, counted, EXAMPLES, most=5)
    assert sum(rows) <= 27 and max(rows) <= 5
    rows.clear(), rows_in_memory.clear()
    verify(engine, counted, EXAMPLES, rows=2, most=2)
    assert sum(rows) <= 14 and max(rows_in_memory) <= 4
