"""Ranges of blocks for stages: the best of all splits, with the cost of embedding and head where they are."""

import itertools
import random

import torch
from torch import nn

from groupwise.pipeline.split import choose_ranges, even_out
from tests.pipeline.tiny import gpt2


def loads(ranges, costs, entry, exit):
    found = [sum(costs[start:stop]) for start, stop in ranges]
    found[0] += entry
    found[-1] += exit
    return max(found)


def every_split(blocks, stages):
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(itertools.pairwise((0, *inner, blocks)))


def test_even_out_finds_the_best_of_all_splits():
    draw = random.Random(0)
    for _ in range(150):
        blocks = draw.randint(1, 9)
        stages = draw.randint(1, blocks)
        costs = [draw.randint(1, 9) for _ in range(blocks)]
        entry, exit = draw.choice([0, 5, 20]), draw.choice([0, 5, 30])
        best = min(loads(ranges, costs, entry, exit) for ranges in every_split(blocks, stages))
        assert loads(even_out(costs, stages, entry, exit), costs, entry, exit) == best


def test_embedding_and_head_count_on_their_own_stages():
    model = gpt2(blocks=6, words=300)  # an embedding of 2400 parameters beside blocks of 872
    assert choose_ranges(model, 2) == ((0, 3), (3, 6))
    assert choose_ranges(model, 3) == ((0, 1), (1, 5), (5, 6))
    large = nn.Linear(8, 8, bias=False)
    large.weight = nn.Parameter(torch.zeros(500, 8))
    model.lm_head = large
    assert choose_ranges(model, 2) == ((0, 4), (4, 6))
