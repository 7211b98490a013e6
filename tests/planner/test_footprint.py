"""The footprint of the pipeline's code on fake tensors matches the memory that the same code takes on real ones."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.meters import peak_bytes
from groupwise.planner import footprint as module
from groupwise.planner.footprint import Kind, Passes, Work, cut_out, inputs

MIDDLE = Kind(2, False, False)
footprint = cache(module.footprint)  # several tests use the same one


@pytest.fixture(scope="module")
def work():
    from transformers import GPT2Config

    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return Work(GPT2Config(**sizes, **quiet), microbatch=4, length=24, rank=4, rematerialize=False)


def test_bytes_of_weights_adapters_and_messages_match_a_count_by_hand(work):
    found = footprint(work, MIDDLE, "device")
    block = 12 * 32 * 32 + 13 * 32
    assert found.frozen == 2 * 4 * block
    assert found.trained == 2 * 4 * 4 * (32 + 3 * 32)
    assert found.received == found.sent == 4 * 4 * 24 * 32
    first, last = footprint(work, Kind(2, True, False), "none"), footprint(work, Kind(2, False, True), "none")
    assert (first.received, last.sent) == (0, 0)
    assert first.frozen == found.frozen + 4 * (50 + 32) * 32
    assert last.frozen == found.frozen + 4 * (50 * 32 + 2 * 32)


def test_numbers_of_operations_match_a_count_by_hand(work):
    """Products with the weights, two operations each; attention; LoRA. Backward: no gradients of frozen weights."""
    found = footprint(work, MIDDLE, "none")
    tokens, weights = 4 * 24, 12 * 32 * 32
    attention, adapters = 4 * 4 * 24 * 24 * 32, 2 * tokens * 4 * (32 + 96)
    assert found.forward_operations == 2 * (2 * tokens * weights + attention + adapters)
    again = footprint(replace(work, rematerialize=True), MIDDLE, "none")
    extra = again.backward_operations - found.backward_operations
    assert extra == found.forward_operations - 2 * (2 * tokens * 4 * 32 * 32)  # no block's last product is needed again


def test_rematerialisation_stores_only_the_inputs_of_blocks(work):
    kept, again = (footprint(replace(work, rematerialize=flag), MIDDLE, "device") for flag in (False, True))
    assert again.stored <= 4 * again.sent < kept.stored
    assert again.backward > kept.backward


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    ("name", "rematerialize", "kind"),
    [
        ("none", False, MIDDLE),
        ("device", True, MIDDLE),
        ("norms", True, MIDDLE),
        ("sums", False, MIDDLE),
        ("device", True, Kind(2, True, False)),
        ("device", False, Kind(2, False, True)),
        *(
            pytest.param(name, flag, MIDDLE, marks=pytest.mark.slow)
            for name, flag in (("none", True), ("device", False), ("norms", False), ("sums", True))
        ),
        pytest.param("device", False, Kind(2, True, False), marks=pytest.mark.slow),
        pytest.param("device", True, Kind(2, False, True), marks=pytest.mark.slow),
    ],
)
def test_predicted_bytes_match_measured_bytes(work, name, rematerialize, kind):
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

    measured, _ = peak_bytes(make, "cpu")
    messages = found.received + found.sent
    predicted = found.frozen + 2 * found.trained + messages + max(found.forward, found.stored + found.backward)
    assert predicted == pytest.approx(measured, rel=0.05)
