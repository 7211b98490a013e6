"""Evaluation on two stages gives every process the metrics of the whole model, in float64."""

import numpy as np
import pytest
import torch

from groupwise.config.schema import LoraConfig, TrainConfig
from groupwise.pipeline.evaluation import StageLink, evaluate_outcomes, evaluate_pipeline
from groupwise.pipeline.split import choose_ranges, cut
from groupwise.tasks import make_task
from groupwise.training.step import Trainer
from tests.pipeline.ranks import run_ranks
from tests.tasks.test_text_generation import CPU, config

LORA = {"trains": "lora", "lora": LoraConfig(rank=2, targets=["c_attn"])}
CALLS = {  # split, batch size, limit, final
    "e2e": [("valid", 4, 10, False), ("train", 3, None, True), ("test", 5, 7, True)],
    "e2e, sum": [("valid", 4, 10, False)],
    "samsum, lora": [("valid", 3, 5, True), ("test", 3, 5, True)],
}


def make(name):
    torch.manual_seed(0)
    shape = {"shape": {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 160}}
    model = {**shape, "dropout": 0.3, "attention_dropout": 0.3, **(LORA if "lora" in name else {"untie": True})}
    token_loss = TrainConfig(token_loss="sum" if name.endswith("sum") else "mean")
    settings = config(name.partition(",")[0], model, {"train_limit": 20, "max_length": 96}, train=token_loss)
    task = make_task(settings, CPU)
    for parameter in task.model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    task.model.double().train()
    return task, settings.train.token_loss


def on_stages(rank, world):
    found = {}
    for name, calls in CALLS.items():
        task, token_loss = make(name)
        stage = cut(task.model, choose_ranges(task.model, world), rank, token_loss=token_loss)
        task.model = stage
        metrics = [evaluate_pipeline(task, StageLink(stage, CPU), *call) for call in calls]
        found[name] = (metrics, task.outputs(), all(module.training for module in stage.modules()))
    feed = task.feed("valid", CPU)
    filled = feed.microbatches(np.arange(5), 4)  # the second has three fillers
    found["filled"] = evaluate_outcomes(StageLink(stage, CPU), filled)
    found["plain"] = evaluate_outcomes(StageLink(stage, CPU), feed.microbatches(np.arange(5), 5))
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(on_stages, 2)


@pytest.mark.parametrize("name", CALLS)
def test_every_process_gets_the_metrics_of_the_whole_model(found, name):
    task, _ = make(name)
    expected = [pytest.approx(Trainer(task, None, None).evaluate(*call), rel=1e-12) for call in CALLS[name]]
    for rank in found:
        metrics, outputs, training = rank[name]
        assert metrics == expected
        assert outputs == task.outputs()
        assert training


def test_fillers_are_left_out(found):
    for rank in found:
        assert rank["filled"].shape == (5,)
        torch.testing.assert_close(rank["filled"], rank["plain"], rtol=1e-12, atol=0)
