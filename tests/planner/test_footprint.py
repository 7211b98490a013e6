"""The pipeline's own code on tensors that do not exist: its bytes are those of the same code on real ones."""

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.meters import peak_bytes
from groupwise.planner import footprint as imagining
from groupwise.planner.footprint import Imagined, Kind, Passes, Work, cut_out, inputs

MIDDLE = Kind(2, False, False)
footprint = cache(imagining.footprint)  # several tests look at one


@pytest.fixture(scope="module")
def work():
    from transformers import GPT2Config

    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return Work(GPT2Config(**sizes, **quiet), microbatch=4, length=24, places=24, rank=4, rematerialize=False)


def test_weights_adapters_and_messages_by_hand(work):
    found = footprint(work, MIDDLE, "device")
    block = 12 * 32 * 32 + 13 * 32
    assert found.frozen == 2 * 4 * block
    assert found.trained == 2 * 4 * 4 * (32 + 3 * 32)
    assert found.received == found.sent == 4 * 4 * 24 * 32
    first, last = footprint(work, Kind(2, True, False), "none"), footprint(work, Kind(2, False, True), "none")
    assert (first.received, last.sent) == (0, 0)
    assert first.frozen == found.frozen + 4 * (50 + 32) * 32
    assert last.frozen == found.frozen + 4 * (50 * 32 + 2 * 32)


def test_operations_by_hand(work):
    """Products with the weights, two operations each; attention; LoRA. Backward: no gradients of frozen weights."""
    found = footprint(work, MIDDLE, "none")
    tokens, weights = 4 * 24, 12 * 32 * 32
    attention, adapters = 4 * 4 * 24 * 24 * 32, 2 * tokens * 4 * (32 + 96)
    assert found.forward_operations == 2 * (2 * tokens * weights + attention + adapters)
    again = footprint(replace(work, rematerialize=True), MIDDLE, "none")
    extra = again.backward_operations - found.backward_operations
    assert extra == found.forward_operations - 2 * (2 * tokens * 4 * 32 * 32)  # no block's last product is needed again


def test_rematerialisation_keeps_the_inputs_of_blocks_alone(work):
    kept, again = (footprint(replace(work, rematerialize=flag), MIDDLE, "device") for flag in (False, True))
    assert again.stored <= 4 * again.sent < kept.stored
    assert again.backward > kept.backward


def test_microbatches_and_blocks_grow_as_they_should(work):
    one, two, three = (footprint(work, Kind(blocks, False, False), "device") for blocks in (1, 2, 3))
    assert three.stored - two.stored == two.stored - one.stored
    double = footprint(replace(work, microbatch=8), MIDDLE, "device")
    assert double.stored == pytest.approx(2 * two.stored, rel=0.01)


def test_half_precision_halves_weights_and_messages(work):
    found, half = footprint(work, MIDDLE, "none"), footprint(replace(work, dtype="bfloat16"), MIDDLE, "none")
    assert (2 * half.frozen, 2 * half.sent, half.trained) == (found.frozen, found.sent, found.trained)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    ("name", "rematerialize", "kind"),
    [
        ("none", False, MIDDLE),
        ("device", True, MIDDLE),
        ("layer", False, MIDDLE),
        ("norms", True, MIDDLE),
        ("sums", False, MIDDLE),
        ("device", True, Kind(2, True, False)),
        ("device", False, Kind(2, False, True)),
        *(
            pytest.param(name, flag, MIDDLE, marks=pytest.mark.slow)
            for name, flag in (("none", True), ("device", False), ("layer", True), ("norms", False), ("sums", True))
        ),
        pytest.param("device", False, Kind(2, True, False), marks=pytest.mark.slow),
        pytest.param("device", True, Kind(2, False, True), marks=pytest.mark.slow),
    ],
)
def test_imagined_bytes_are_measured_bytes(work, name, rematerialize, kind):
    work = replace(work, rematerialize=rematerialize)
    found = footprint(work, kind, name)

    def make():
        stage = cut_out(work, kind, "cpu")
        passes = Passes(stage, work, name)
        x, kwargs = inputs(stage, work)
        gradient = None if kind.last else torch.zeros(4, 24, 32)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

        def step():
            passes.backward(passes.forward(x, kwargs), gradient)
            x.grad = None

        return step

    gc.collect()
    measured, _ = peak_bytes(make, "cpu")
    messages = found.received + found.sent
    predicted = found.frozen + 2 * found.trained + messages + max(found.forward, found.stored + found.backward)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_bytes_are_held_while_a_tensor_lives_and_views_are_free():
    imagined = Imagined()
    with imagined.running() as meter:
        x = torch.empty(100, dtype=torch.float32)
        view = x[:50].view(5, 10)
        assert (meter.held, meter.peak) == (400, 400)
        y = x + x
        del y
        assert (meter.held, meter.peak) == (400, 800)
        del x
        assert meter.held == 400
        del view
        assert meter.held == 0


def test_a_module_is_taken_over_with_its_shared_parameters_and_not_counted():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    module[1].weight = module[0].weight
    imagined = Imagined()
    imagined.take(module)
    assert module[1].weight is module[0].weight and module[0].weight.device.type == "cpu"
    with imagined.running() as meter:
        y = module(torch.empty(3, 10))
        assert meter.operations == 2 * 2 * 3 * 10 * 10
        y.sum().backward()
        assert module[0].weight.grad.shape == (10, 10)
    assert meter.operations == 6 * 2 * 3 * 10 * 10 - 2 * 3 * 10 * 10  # no gradient goes to the input


def test_attention_is_counted():
    imagined = Imagined()
    with imagined.running() as meter:
        q = torch.empty(2, 4, 8, 16, requires_grad=True)
        scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward = 2 * 2 * 4 * 8 * 8 * 16 * 2  # two products of T x T x d a head
    assert meter.operations == pytest.approx(forward * 3.5)  # and five in the backward pass


def test_a_terabyte_can_be_imagined():
    with Imagined().running() as meter:
        x = torch.empty(10**12, dtype=torch.uint8)
        assert meter.held == 10**12
        del x
