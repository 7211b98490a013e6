"""Replicas that train by `make_private` take the same steps as one process, and must agree on their settings."""

import numpy as np
import torch

from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.test_private import SEED, STEPS, Points, go_on, start, weights


def _on_two(rank, world, sigma):
    task = Points(dropout=0.0)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(rank)  # replaced by the weights of the first replica
    source = NoiseSource.from_seed(SEED + rank)
    microbatch = 7 - rank  # microbatches may differ between replicas
    private = start(task, ranks=Ranks(), noise_multiplier=sigma, noise_source=source, microbatch=microbatch)
    steps = list(private.steps())
    return weights(task.model), private.core.thresholds.clip_thresholds, [step.nonprivate["loss"] for step in steps]


def test_two_replicas_match_one_process():
    task = Points(dropout=0.0)
    private = start(task)
    steps = list(private.steps())
    for found, thresholds, mean_losses in run_ranks(_on_two, 2, 1.0):
        torch.testing.assert_close(found, weights(task.model), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(thresholds, private.core.thresholds.clip_thresholds, rtol=1e-12, atol=0)
        assert len(mean_losses) == STEPS
        np.testing.assert_allclose(mean_losses, [step.nonprivate["loss"] for step in steps], rtol=1e-9)


def _small_shares(rank, world):
    task = Points()  # the replicas have different dropout masks
    private = start(task, adam=False, ranks=Ranks(), batch_size=2, steps=12, noise_multiplier=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(private.core.optimizer, total_iters=12)
    shares = [len(private.core.ranks.share(private.core.sampler.indices(step))) for step in range(12)]
    for _ in private.steps():
        schedule.step()
    return weights(task.model), schedule.last_epoch, shares


def test_a_replica_with_an_empty_share_of_a_batch_steps_its_schedule_too():
    (one, epochs, shares), (other, *_, others) = run_ranks(_small_shares, 2)
    assert 0 in others and any(ours and not theirs for ours, theirs in zip(shares, others, strict=True))
    assert epochs == 12
    assert torch.equal(one, other)


def _refused(rank, world, what):
    task = Points(dropout=0.0)
    if what == "data":
        task.x = task.x.roll(rank, 0)
    settings = {"noise_multiplier": 1.0 + rank} if what == "plan" else {}
    try:
        private = start(task, ranks=Ranks(), noise_source=None, clip="fixed_layer", **settings)
        if what == "thresholds":
            private.set_threshold(1.0 + rank)
        if what == "states" and rank:
            private.core.executed = 1
        go_on(private)
    except UserError as error:
        return str(error)


def test_replicas_with_different_data_plans_or_states_are_refused():
    for what in ("data", "plan", "thresholds", "states"):
        found = "different thresholds" if what == "thresholds" else f"the same {what.replace('states', 'step')}:"
        for message in run_ranks(_refused, 2, what):
            assert found in message, what
