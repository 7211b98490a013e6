"""The tests' own processes: results by rank, and the first failure as it was."""

import pytest
import torch
import torch.distributed as dist

from tests.pipeline.ranks import run_ranks


def _add(rank, world, start):
    total = torch.tensor(float(start + rank))
    dist.all_reduce(total)
    return rank, float(total)


def _fail(rank, world):
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_results_come_by_rank_and_the_first_failure_is_told():
    assert run_ranks(_add, 2, 1) == [(0, 3.0), (1, 3.0)]
    with pytest.raises(AssertionError, match="only here"):
        run_ranks(_fail, 2)
