"""Before training, few examples of different lengths are traced, and fewer are checked if memory runs out."""

import numpy as np
import pytest
import torch

from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, RunConfig, TrainConfig
from groupwise.privacy import make_plan
from groupwise.training.from_config import make_engine
from groupwise.training.microbatches import examples_to_trace
from groupwise.training.ranks import Ranks
from trust.planted_bugs.worst import Given


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 1000])
def test_the_longest_the_shortest_and_some_examples_between_are_traced(size):
    order = np.random.default_rng(0).permutation(size)
    chosen = examples_to_trace(order)
    assert len(chosen) == len(set(chosen)) == min(size, 6) and set(chosen) <= set(order)
    assert chosen[0] == order[0] and order[-1] in chosen[:2] and all(type(i) is int for i in chosen)
    assert examples_to_trace(np.arange(101), most=5) == [0, 100, 25, 50, 75]


class Scarce(Given):
    """A task that runs out of memory with more than `room` examples."""

    room = 7

    def losses(self, model, batch):
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().losses(model, batch)


@pytest.mark.parametrize(("room", "checked"), [(7, 4), (4, 2)])
def test_the_check_and_then_a_step_take_fewer_examples_if_memory_runs_out(room, checked, capsys):
    task = Scarce(torch.randn(40, 1, 1, 4, dtype=torch.float64))
    task.room = room
    config = RunConfig(clip=ClipConfig(policy="fixed", rescale=False), train=TrainConfig(microbatch=32))
    engine = make_engine(task.model, config.clip)
    sizes = {"dataset_size": 40, "expected_batch_size": 40, "steps": 1, "delta": 1e-5}
    plan = make_plan(**sizes, noise_multiplier=1.0, num_groups=len(engine.groups), accountant="rdp")
    trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), Ranks(), None)
    assert f"checking with {checked} examples at once" in capsys.readouterr().err and trainer.private.sums.size == 32
    trainer.step(0)
    assert trainer.private.sums.size == 4
