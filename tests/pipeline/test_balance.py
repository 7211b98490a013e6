"""Ranges of blocks: against every way there is, by hand, and on a model without memory."""

import itertools
import random

import pytest
import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.pipeline.split import choose_ranges, even_out
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # before transformers, which falls without it


def gpt2(blocks=4, words=40, **shape):
    import transformers

    config = transformers.GPT2Config(
        n_layer=blocks, n_embd=8, n_head=2, n_positions=16, vocab_size=words, bos_token_id=0, eos_token_id=0, **shape
    )
    return transformers.GPT2LMHeadModel(config)


def loads(ranges, costs, entry, exit):
    found = [sum(costs[start:stop]) for start, stop in ranges]
    found[0] += entry
    found[-1] += exit
    return max(found)


def every_way(blocks, stages):
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(itertools.pairwise((0, *inner, blocks)))


def test_the_best_of_all_ways():
    draw = random.Random(0)
    for _ in range(150):
        blocks = draw.randint(1, 9)
        stages = draw.randint(1, blocks)
        costs = [draw.randint(1, 9) for _ in range(blocks)]
        entry, exit = draw.choice([0, 5, 20]), draw.choice([0, 5, 30])
        best = min(loads(ranges, costs, entry, exit) for ranges in every_way(blocks, stages))
        assert loads(even_out(costs, stages, entry, exit), costs, entry, exit) == best


def test_embedding_and_head_weigh_where_they_are():
    model = gpt2(blocks=6, words=300)  # an embedding of 2400 parameters beside blocks of 872
    assert choose_ranges(model, 2) == ((0, 3), (3, 6))
    assert choose_ranges(model, 3) == ((0, 1), (1, 5), (5, 6))
    large = nn.Linear(8, 8, bias=False)
    large.weight = nn.Parameter(torch.zeros(500, 8))
    model.lm_head = large
    assert choose_ranges(model, 2) == ((0, 4), (4, 6))


@pytest.mark.parametrize("counts", [[1, 2], [1, 1, 1], [4, 0, 0]])
def test_counts_that_do_not_add_up(counts):
    with pytest.raises(UserError, match=r"is not a count for each of 3 stages that add up to the model's 4 blocks"):
        choose_ranges(gpt2(), 3, by_hand=counts)


@pytest.mark.parametrize("stages", [0, 5])
def test_too_many_stages(stages):
    with pytest.raises(UserError, match=rf"pipeline.stages={stages} cannot share 4 blocks: give 1 to 4"):
        choose_ranges(gpt2(), stages)
