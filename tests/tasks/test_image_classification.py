"""The image classification task: per-example losses, metrics, subsets of the data, and scattering features."""

import pytest
import torch
import torch.nn.functional as F

from groupwise.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from groupwise.errors import UserError
from groupwise.tasks import make_task
from groupwise.training.step import Trainer

CPU = torch.device("cpu")


def config(**changes) -> RunConfig:
    small = ModelConfig(depth=10, width=1, norm_groups=8)
    return RunConfig(
        **{"model": small, "data": DataConfig("digits"), "train": TrainConfig(channels_last=False)} | changes
    )


def test_losses_are_per_example():
    task = make_task(config(), CPU)
    task.model.eval()
    together = task.losses_of([3, 5, 8])
    assert together.shape == (3,)
    torch.testing.assert_close(torch.cat([task.losses_of([i]) for i in (3, 5, 8)]), together, rtol=1e-3, atol=1e-5)


def test_metrics_match_a_plain_loop():
    task = make_task(config(), CPU)
    images, labels = task._splits["valid"]
    with torch.no_grad():
        logits = task.model(task._prepare(images[:50]))
    expected = {"accuracy": 100 * float((logits.argmax(1) == labels[:50]).float().mean())}
    expected["loss"] = float(F.cross_entropy(logits, labels[:50]))
    assert Trainer(task, None, None).evaluate("valid", batch_size=16, limit=50) == pytest.approx(expected, rel=1e-4)
    assert task.model.training


def test_limit_keeps_classes_balanced():
    task = make_task(config(data=DataConfig("digits", train_limit=100)), CPU)
    assert task.train_size == 100 == task.describe_data()["train_examples"]
    assert task._splits["train"][1].bincount().tolist() == [10] * 10


def test_holdout_share_of_the_training_images_is_the_validation_set():
    full = make_task(config(), CPU)
    task = make_task(config(data=DataConfig("digits", holdout=0.2, train_limit=100)), CPU)
    described = task.describe_data()
    train = {image.numpy().tobytes() for image in full._splits["train"][0]}
    assert {image.numpy().tobytes() for image in task._splits["valid"][0]} < train
    assert described["train_examples"] == task.train_size == 100  # the limit is applied afterwards
    assert described["valid_examples"] == len(task._splits["valid"][0]) < 400
    assert "valid, a share of 0.2 of the training set" in described["selected_on"]
    assert "test set" in full.describe_data()["selected_on"]


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="task=mnist"):
        make_task(config(task="mnist"), CPU)
    with pytest.raises(UserError, match=r"model\.name=vgg"):
        make_task(config(model=ModelConfig(name="vgg")), CPU)


def test_small_network_learns_on_scattering_features():
    scatter = ModelConfig(name="scatter_cnn", norm_groups=27)
    task = make_task(config(model=scatter), CPU)
    assert task._splits["train"][0].shape[1:] == (81, 2, 2)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5, momentum=0.9)
    for step in range(20):
        optimizer.zero_grad()
        task.losses_of(range(step % 4, task.train_size, 4)).mean().backward()
        optimizer.step()
    assert Trainer(task, None, None).evaluate("valid", 400)["accuracy"] > 60
    with pytest.raises(UserError, match=r"model\.norm_groups=16 does not divide the 81"):
        make_task(config(model=ModelConfig(name="scatter_cnn")), CPU)
