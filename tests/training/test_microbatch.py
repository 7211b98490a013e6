"""The automatic physical batch: a power of two, smaller for larger activations, the same each time."""

import numpy as np
import pytest
import torch
from torch import nn

from groupwise.training import memory as microbatch
from groupwise.training.memory import choose_microbatch


def losses_of(width: int):
    model, x = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)), torch.randn(1024, 8)
    return model, lambda examples: model(x[list(examples)]).square().sum(1)


def chosen(width: int, most: int = 1024) -> int:
    model, losses = losses_of(width)
    return choose_microbatch(losses, model, torch.device("cpu"), np.arange(most))


def test_it_is_a_power_of_two_within_the_limits(monkeypatch):
    monkeypatch.setattr(microbatch, "CPU_BUDGET", 1 << 20)
    sizes = [chosen(width) for width in (16, 1024, 8192, 1 << 20)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] >= sizes[3] == 1
    assert all(size & (size - 1) == 0 for size in sizes)
    assert chosen(16, most=100) == 64


def test_activations_fit_the_budget(monkeypatch):
    monkeypatch.setattr(microbatch, "CPU_BUDGET", 1 << 22)
    saved = 4 * (8 + 2 * 4096)  # bytes an example: the input, and tanh's output, kept by tanh and by the next layer
    assert chosen(4096) * saved <= 1 << 22


def test_it_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    drop = nn.Dropout(0.5)
    (model, losses), x = losses_of(16), torch.randn(4, requires_grad=True)
    torch.manual_seed(3)
    choose_microbatch(lambda rows: drop(losses(rows)) + x[: len(rows)], model, torch.device("cpu"), np.arange(64))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("most", [1, 3])
def test_a_tiny_data_set(most):
    assert chosen(16, most=most) <= most


def test_the_largest_examples_are_weighed_and_the_weights_are_not(monkeypatch):
    monkeypatch.setattr(microbatch, "CPU_BUDGET", 1 << 20)
    model, asked = nn.Linear(1 << 18, 1), []  # 1 MiB of weights

    def losses(examples):
        asked.append(list(examples))
        return (model.weight[0, : len(examples)] * 2).sum().expand(len(examples))

    assert choose_microbatch(losses, model, torch.device("cpu"), np.arange(64)[::-1]) == 64
    assert asked == [[63, 62]]
