"""The step of a pipeline: its passes, buffers and losses, examples that are left out, and errors."""

import gc
from collections import Counter
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from groupwise.errors import UserError
from groupwise.pipeline.runner import SteppedStage, held_at_once
from groupwise.pipeline.trainer import PipelineTrainer
from groupwise.training.ranks import Ranks
from groupwise.training.task import Microbatch
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import BATCHES, MICROBATCH, WORDS, Case, Texts, make_trainer

COUNTS = [-(-len(BATCHES[step]) // MICROBATCH) for step in (0, 2)]
"""Microbatches of the steps that have examples."""


def test_1f1b_holds_no_more_microbatches_than_there_are_stages_to_come():
    assert [held_at_once(4, stage, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert [held_at_once(4, stage, 2) for stage in range(4)] == [2, 2, 2, 1]


def drawn(trainer: PipelineTrainer, size: int, least: int = 1) -> list[Microbatch]:
    """The microbatches of the first step, with its examples in order."""
    return trainer.private.sums.feed.microbatches(trainer.private.sampler.indices(0), size, least)


def on_two_stages(rank: int, world: int) -> dict:
    """The results of all checks on two processes, by name."""
    ranks = Ranks(2)
    checks = (passes, buffers, losses, same_dropout, left_out)
    return {check.__name__: check(ranks) for check in checks}


def passes(ranks: Ranks) -> dict:
    """How often the stage runs forward and backward, and a block forward, in the two steps that have examples."""
    found = {}
    for again in (False, True):
        trainer = make_trainer(Case(rematerialize=again), ranks)
        seen = Counter()

        def count(_, __, output, seen=seen):
            seen["forward"] += 1
            output.register_hook(lambda _: seen.update(["backward"]))

        trainer.runner.stage.register_forward_hook(count)
        block = next(m for m in trainer.runner.stage.modules() if type(m).__name__ == "GPT2MLP")
        block.register_forward_pre_hook(lambda *_, seen=seen: seen.update(["block"]))
        steps = []
        for step in (0, 2):
            seen.clear()
            random = torch.get_rng_state()
            trainer.private.executed = step
            trainer.step(step)
            assert torch.equal(random, torch.get_rng_state())
            steps.append(dict(seen))
        found[again] = steps
    return found


def buffers(ranks: Ranks) -> tuple:
    """Numbers of microbatches, of receive buffers, and of stages that outlive their step without the collector."""
    trainer = make_trainer(Case(), ranks)
    microbatches = drawn(trainer, 2)
    kept: list[int] = []
    backward = SteppedStage.backward_one_chunk

    def count(stage, *args, **kwargs):
        infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
        kept.append(len({info.buffer.data_ptr() for own in infos for info in own if info.buffer is not None}))
        return backward(stage, *args, **kwargs)

    SteppedStage.backward_one_chunk = count
    gc.collect()
    gc.disable()
    try:
        trainer.runner.run(microbatches, nullcontext)
        alive = sum(isinstance(thing, SteppedStage) for thing in gc.get_objects())
    finally:
        gc.enable()
        SteppedStage.backward_one_chunk = backward
    return len(microbatches), set(kept), alive


def losses(ranks: Ranks) -> tuple:
    """Losses of a step, and of one without examples."""
    trainer = make_trainer(Case(), ranks)
    microbatches = drawn(trainer, MICROBATCH, trainer.runner.stage.count)
    return trainer.runner.run(microbatches, nullcontext), trainer.runner.run([], nullcontext)


def same_dropout(ranks: Ranks) -> float:
    """Flat clipping of one example, with dropout: the squared norm of this stage's part."""
    trainer = make_trainer(Case(grouping="flat", dropout=0.5), ranks, batches=((3,),))
    trainer.private.engine.set_thresholds(0.01)
    microbatches = drawn(trainer, 1, 2)
    trainer.runner.run_flat(microbatches, partial(trainer.private.microbatch, 0))
    return sum(float(p.grad.square().sum()) for p in trainer.runner.stage.parameters())


def left_out(ranks: Ranks) -> tuple:
    """Flat and per device: sums with an example whose gradient is NaN, and without it."""
    found = []
    for grouping in ("flat", "device"):
        both = []
        for batch in ((0, 5, 1), (0, 1)):
            trainer = make_trainer(Case(grouping=grouping), ranks)
            data, last = Texts(), WORDS - 1  # a token of example 5 alone
            data.rows = [np.minimum(row, last if number == 5 else last - 1) for number, row in enumerate(data.rows)]
            data.rows[5][0] = last
            if trainer.runner.stage.first:
                trainer.runner.stage.body.wte.weight.data[last] = torch.nan
            run = trainer.runner.run_flat if grouping == "flat" else trainer.runner.run
            run(data.feed().microbatches(torch.tensor(batch).numpy(), 2, 2), nullcontext)
            counts = (trainer.private.engine.nonfinite, trainer.private.engine.examples)
            both.append(([p.grad.clone() for p in trainer.runner.stage.parameters()], counts))
        found.append(both)
    return tuple(found)


@pytest.fixture(scope="module")
def seen():
    """One start of two processes."""
    return run_ranks(on_two_stages, 2)


def test_two_stages_run_the_expected_passes_and_keep_few_buffers(seen):
    for rank, found in enumerate(seen):
        for again, steps in found["passes"].items():
            for count, step in zip(COUNTS, steps, strict=True):
                blocks = 2 * count if again else count
                assert step == {"forward": count, "backward": count, "block": blocks}, (rank, again)
        sends = rank == 0  # the first stage receives gradients, the last activations
        assert found["buffers"] == (6, {2 if sends else 1}, 0)


def test_losses_come_from_the_last_stage_in_order_and_without_fillers(seen):
    alone = make_trainer(Case(stages=1), Ranks())
    (whole,) = drawn(alone, len(BATCHES[0]))
    with torch.no_grad():
        expected = alone.runner.stage(whole.first, **whole.kwargs)
    assert seen[0]["losses"] == (None, None)
    found, none = seen[1]["losses"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(none) == 0


def test_both_passes_of_flat_clipping_have_the_same_dropout(seen):
    assert sum(found["same_dropout"] for found in seen) ** 0.5 == pytest.approx(0.01, rel=1e-9)


def test_an_example_without_a_finite_norm_is_left_out_on_every_stage(seen):
    for found in seen:
        for (sums, counts), (expected, others) in found["left_out"]:
            assert counts == (1, 3) and others == (0, 2)
            for gradient, other in zip(sums, expected, strict=True):
                torch.testing.assert_close(gradient, other, rtol=0, atol=1e-9)


def test_an_error_inside_a_pass_is_one_sentence(monkeypatch):
    trainer = make_trainer(Case(stages=1), Ranks())
    microbatches = drawn(trainer, MICROBATCH)
    errors = {"lower it": UserError("lower it"), "Stage 0 ran out of its device's memory": torch.OutOfMemoryError()}
    for sentence, cause in errors.items():

        def fail(*_, cause=cause):
            raise RuntimeError("Failed to run stage forward") from cause  # as torch wraps it

        monkeypatch.setattr(trainer.runner, "_stepped", fail)
        with pytest.raises(UserError, match=sentence):
            trainer.runner.run(microbatches, nullcontext)
