"""`gradient_norms` matches a loop over examples and leaves the model unchanged."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, by_mapping, flat, gradient_norms, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.errors import UserError
from tests.clipping.test_trace_plan import Positions, texts

EXAMPLES = 9


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(4, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x) + self.places).mean(1))


def model_and_losses():
    torch.manual_seed(0)
    model, x, y = Transformer().double(), torch.randn(EXAMPLES, 5, 4).double(), torch.arange(EXAMPLES) % 3
    return model, lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")


def norms_by_hand(model, losses, partition):
    """Group name -> the gradient norm of each example, by a loop."""
    norms = clipped_sums(model, lambda i: losses([i])[0], range(EXAMPLES), partition, [1.0] * len(partition)).norms
    return {group.name: row for group, row in zip(partition, norms, strict=True)}


@pytest.mark.parametrize(
    "make_partition", [per_layer, flat, lambda model: by_mapping(model, {"block*": "block", "*": "rest"}), None]
)
def test_norms_match_a_loop_over_examples(make_partition):
    model, losses = model_and_losses()
    partition = None if make_partition is None else make_partition(model)
    expected = norms_by_hand(model, losses, partition or per_layer(model))
    found = gradient_norms(model, losses, range(EXAMPLES), partition, microbatch=4)
    assert list(found) == list(expected)
    for name, norms in found.items():
        torch.testing.assert_close(norms, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("examples", "microbatch"), [([], 4), ([3], 4), ([3, 1, 3], 1), ([5, 0, 5, 2], 3)])
def test_any_list_of_examples_is_measured(examples, microbatch):
    model, losses = model_and_losses()
    expected = norms_by_hand(model, losses, flat(model))["all"][examples]
    found = gradient_norms(model, losses, examples, flat(model), microbatch=microbatch)["all"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_texts_of_any_length_are_measured():
    torch.manual_seed(0)
    model = Positions().double()
    losses = texts(model, [5, 2, 8, 3, 7, 1, 4, 8, 6])
    expected = torch.cat([gradient_norms(model, losses, [i], flat(model))["all"] for i in range(EXAMPLES)])
    found = gradient_norms(model, losses, range(EXAMPLES), flat(model), microbatch=4)["all"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


class Stateful(nn.Module):
    """Draws random numbers, some from a generator of its own, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.own = nn.Linear(5, 3), nn.Dropout(0.5), torch.Generator()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.drop(x + torch.rand(x.shape, generator=self.own)))


def trace_only(model, losses):
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, range(6))
        assert engine.examples == 0


@pytest.mark.parametrize("measure", [trace_only, lambda model, losses: gradient_norms(model, losses, range(6))])
@pytest.mark.parametrize("fails", [False, True])
def test_gradients_buffers_and_generators_are_left_unchanged(measure, fails):
    model, x = Stateful(), torch.randn(6, 5)
    gradient = model.layer.weight.grad = torch.ones_like(model.layer.weight)
    before, own = torch.get_rng_state(), model.own.get_state()

    def losses(rows):
        if fails and 5 in rows:
            raise LookupError
        return model(x[list(rows)]).square().sum(1)

    with pytest.raises(LookupError) if fails else nullcontext():
        measure(model, losses)
    assert model.layer.weight.grad is gradient and bool((gradient == 1).all()) and model.layer.bias.grad is None
    assert float(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert measure is not trace_only or torch.equal(model.own.get_state(), own)


def test_misuse_is_refused_and_leaves_the_model_usable():
    model, losses = model_and_losses()
    with pytest.raises(UserError, match="one value per example"):
        gradient_norms(model, lambda rows: losses(rows).mean(), range(9))
    with pytest.raises(UserError, match="one value per example"):
        gradient_norms(model, lambda rows: losses(rows).mean(), [0])
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, range(9))
        with pytest.raises(UserError, match="replaced already"), engine.forward(2):
            gradient_norms(model, losses, [0])
        assert len(gradient_norms(model, losses, range(9))["head"]) == 9, "allowed between the passes of another engine"
