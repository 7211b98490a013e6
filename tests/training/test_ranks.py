"""The processes of a run: their places, sums over replicas, shares of a batch, and values that all agree on."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from groupwise.errors import UserError
from groupwise.training import ranks as module
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks

LENGTHS = -np.sort(-np.random.default_rng(0).integers(1, 100, 103))


def tensors(rank):
    """Several dtypes and layouts, and an empty one."""
    return [
        torch.arange(6.0).view(2, 3) + rank,
        torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last) + torch.arange(4.0),
        torch.tensor([rank], dtype=torch.float64),
        torch.zeros(0),
        torch.full((50,), 0.1 * (rank + 1)),
    ]


def _two_by_two(rank, world):
    """Two replicas of two stages."""
    ranks = Ranks(stages=2)
    place = (ranks.replica, ranks.stage, ranks.replicas, ranks.stages, ranks.main)
    assert dist.get_process_group_ranks(ranks.pipeline) == [2 * ranks.replica, 2 * ranks.replica + 1]
    assert dist.get_process_group_ranks(ranks.data) == [ranks.stage, ranks.stage + 2]
    summed, copied, messages = tensors(rank), tensors(rank), []
    with patch.object(module, "BUCKET", 300), patch.object(dist, "all_reduce", _counting(messages)):
        ranks.sum_(summed)
    ranks.copy_(copied)
    agreed = ranks.agree(rank, 0.5, rank == 3)
    with pytest.raises(UserError, match="pipelines of 3 stages"):
        Ranks(stages=3)
    shares = ranks.share(np.arange(7))
    return place, summed, copied, agreed, shares, ranks.broadcast(f"key {rank}"), ranks.gather([rank]), messages


def _counting(messages):
    def all_reduce(tensor, *args, **kwargs):
        messages.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    original = dist.all_reduce
    return all_reduce


@pytest.fixture(scope="module")
def processes():
    return run_ranks(_two_by_two, 4)


def test_a_process_knows_its_place(processes):
    assert [process[0] for process in processes] == [
        (0, 0, 2, 2, True),
        (0, 1, 2, 2, False),
        (1, 0, 2, 2, False),
        (1, 1, 2, 2, False),
    ]


def test_sums_are_over_the_replicas_of_a_stage_and_copies_from_the_first(processes):
    for stage in (0, 1):
        first, second = processes[stage], processes[stage + 2]
        expected = [a + b for a, b in zip(tensors(stage), tensors(stage + 2), strict=True)]
        for process in (first, second):
            for found, value, copied, one in zip(process[1], expected, process[2], tensors(stage), strict=True):
                assert torch.equal(found, value) and found.stride() == value.stride() and torch.equal(copied, one)


def test_sums_take_few_messages(processes):
    """Of five tensors the 96 floats are more than a bucket, and the empty one is sent with them."""
    assert all(sorted(process[7]) == [1, 6, 50, 96] for process in processes)


def test_all_processes_get_the_same_sums_and_messages(processes):
    assert [process[3] for process in processes] == [[6.0, 2.0, 1.0]] * 4
    assert [process[5] for process in processes] == ["key 0"] * 4
    assert [process[6] for process in processes] == [[[0], [1], [2], [3]]] * 4


def test_the_stages_of_a_replica_share_a_batch(processes):
    assert [process[4].tolist() for process in processes] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5]] * 2


@pytest.mark.parametrize("replicas", [1, 2, 4, 7])
def test_shares_partition_the_batch_evenly(replicas):
    shares = []
    for replica in range(replicas):
        one = Ranks.__new__(Ranks)
        one.replica, one.replicas = replica, replicas
        shares.append(one.share(LENGTHS))
    assert sorted(np.concatenate(shares)) == sorted(LENGTHS)
    counts, totals = [len(share) for share in shares], [share.sum() for share in shares]
    assert max(counts) - min(counts) <= 1 and max(totals) - min(totals) <= LENGTHS.max()
    assert all(list(share) == sorted(share, reverse=True) for share in shares)
