"""Bytes and operations of tensors that do not exist."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from groupwise.planner.footprint import Imagined


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
