"""EmbeddingBag in plain operations: non-finite weights, memory, and options that are refused."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.clipping import attach, flat
from groupwise.clipping.products import embedding_bag
from groupwise.errors import UserError
from tests.clipping.traced import clip_batch, trace_batch

VOCABULARY, SIZE = 7, 4


def test_an_example_with_a_non_finite_weight_is_left_out():
    """Its clip factor is 0, but 0 · inf would be NaN."""
    model = nn.EmbeddingBag(VOCABULARY, SIZE, mode="sum")
    ids, counts = torch.randint(0, VOCABULARY, (3, 5)), torch.ones(3, 5)

    def losses_of(ids: Tensor, counts: Tensor) -> Tensor:
        return model(ids + 0, per_sample_weights=counts).square().sum(1)

    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, losses_of, ids[[0, 2]], counts[:2])
        alone = model.weight.grad.clone()
        model.zero_grad()
        counts[1, 3] = float("inf")
        clip_batch(engine, losses_of, ids, counts)
        assert engine.nonfinite == 1
    torch.testing.assert_close(model.weight.grad, alone)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_several_bags_per_example_form_no_per_example_gradients_of_the_table():
    model, ids = nn.EmbeddingBag(10_000, SIZE, mode="sum"), torch.randint(0, 10_000, (6, 3, 5))

    def losses_of(ids: Tensor) -> Tensor:
        return model(ids.flatten(0, 1)).unflatten(0, (len(ids), 3)).sin().sum((1, 2))

    with attach(model, flat(model), 1.0) as engine:
        trace_batch(engine, losses_of, ids)
        with LargestTensor() as largest:
            clip_batch(engine, losses_of, ids)
    assert largest.numbers == 10_000 * SIZE


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2,), {}, "without offsets"),
        ((2,), {"offsets": torch.tensor([0])}, "with offsets.* as rows"),
        ((2, 2), {"per_sample_weights": torch.ones(2, 2)}, "in mode 'mean'"),
        ((2, 2), {"mode": "sum", "per_sample_weights": torch.ones(3)}, "the input.s shape"),
    ],
)
def test_unsupported_arguments_are_refused(shape, options, message):
    with pytest.raises(UserError, match=message):
        embedding_bag(torch.ones(shape).long(), torch.ones(VOCABULARY, SIZE), **options)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_options_that_cannot_be_clipped_are_refused(kind, option):
    model = kind(VOCABULARY, SIZE, **option)
    with (
        attach(model, flat(model), 1.0) as engine,
        pytest.raises(UserError, match=f"weight.* with .*{next(iter(option))[:6]}"),
    ):
        clip_batch(engine, lambda ids: model(ids).flatten(1).square().sum(1), torch.ones(3, 2).long())
