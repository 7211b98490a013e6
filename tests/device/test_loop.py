"""Training on a GPU matches the reference, resumes with the same noise, and halves microbatches that do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.precision import full_float32
from groupwise.clipping.reference import clipped_sums
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import NoiseSource
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.graphs import WARM_UP, Graphs, recorder_of
from groupwise.training.microbatches import TaskSums
from groupwise.training.private_step import PrivateStep
from groupwise.training.step import Trainer
from groupwise.training.task import row_numbers
from tests.tiny_training import ADAPTIVE_BLOCK, ADAPTIVE_LAYER, FLAT, GHOST, Trained, trainer_of

pytestmark = pytest.mark.cuda
EXAMPLES, BATCH, STEPS, SIGMA = 96, 32, 4, 0.7
KEY = bytes(range(32))
MODES = {clip.name: clip for clip in (ADAPTIVE_LAYER, FLAT, GHOST, ADAPTIVE_BLOCK)}


class Images(Trained):
    """Random images and a small network with the layer types of the paper's convolutional networks."""

    train_size = EXAMPLES

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
        self.model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.model = self.model.to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, y = torch.randn(EXAMPLES, 3, 8, 8), torch.randint(0, 4, (EXAMPLES,))
        self.x, self.y = x.to(device, dtype), y.to(device)
        self.calls, self.fails = 0, (0, 0)
        """The number of microbatches so far, and the numbers of those that run out of memory."""

    def read(self, examples: Any, even: bool = False) -> dict[str, Any]:
        rows = row_numbers(examples, self.x.device)
        return {"x": self.x[rows], "y": self.y[rows]}

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        self.calls += 1
        if self.calls in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        x = batch["x"].contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(x), batch["y"], reduction="none")


def trainer(
    clip: ClipConfig,
    device: torch.device,
    microbatch: int = 16,
    noise: NoiseSource | None = None,
    sigma: float = SIGMA,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    return trainer_of(
        Images(device, dtype),
        clip,
        OptimConfig(name="adam", learning_rate=0.05),
        batch_size=BATCH,
        steps=STEPS,
        sigma=sigma,
        microbatch=microbatch,
        noise=noise or NoiseSource(KEY, generator="Philox"),
        device=device,
    )


def weights(run: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.task.model.parameters()]).cpu().double()


def trained(run: Trainer, steps: range = range(STEPS)) -> Trainer:
    with full_float32():
        for step in steps:
            run.step(step)
    return run


class KeepsClippedSums(TaskSums):
    """Keeps a copy of the clipped sums of a batch before noise is added."""

    def add(self, private: PrivateStep, step: int, drawn: np.ndarray) -> Tensor:
        loss = super().add(private, step, drawn)
        names = self.task.model.named_parameters()
        self.clipped = {name: p.grad.cpu().double() for name, p in names if p.grad is not None}
        return loss


@pytest.mark.parametrize("mode", MODES)
def test_release_is_reference_sums_plus_noise_of_the_key(device: torch.device, mode: str) -> None:
    run = trainer(MODES[mode], device)
    truth = trainer(MODES[mode], torch.device("cpu"), dtype=torch.float64)
    drawn = run.private.sampler.indices(0)
    thresholds = run.private.thresholds
    assert thresholds is not None and run.private.engine is not None
    clips = thresholds.clip_thresholds.tolist()
    run.private.sums = seen = KeepsClippedSums(run.task, 16)
    with full_float32():
        noisy = run.private.step()
    names = {parameter: name for name, parameter in run.task.model.named_parameters()}
    assert truth.private.engine is not None
    partition = truth.private.engine.partition
    loop = clipped_sums(truth.task.model, lambda i: truth.task.losses_of([i])[0], drawn.tolist(), partition, clips)
    for name, expected in loop.sums.items():
        assert float((seen.clipped[name] - expected).norm()) <= 1e-4 * max(clips) * len(drawn) ** 0.5
    assert noisy.drawn == len(drawn) and noisy.noise_norm is not None and noisy.noise_norm > 0.0
    again = [torch.zeros(p.shape) for group in run.private.engine.groups for p in group.parameters]
    std = run.private.plan.gradient_noise_multiplier * float(np.linalg.norm(clips))
    NoiseSource(KEY, generator="Philox").add_gaussians_(again, [std] * len(again), 0)
    order = [names[p] for group in run.private.engine.groups for p in group.parameters]
    for name, noise in zip(order, again, strict=True):
        gradient = run.task.model.get_parameter(name).grad
        assert gradient is not None
        expected = (seen.clipped[name] + noise.double()) / BATCH
        torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-5, atol=1e-6 * std / BATCH)


@pytest.mark.parametrize("mode", MODES)
def test_training_matches_float64_training_on_the_cpu(device: torch.device, mode: str) -> None:
    found = weights(trained(trainer(MODES[mode], device)))
    truth = weights(trained(trainer(MODES[mode], torch.device("cpu"), dtype=torch.float64)))
    start = weights(trainer(MODES[mode], torch.device("cpu")))
    assert float((found - truth).norm()) <= 0.02 * float((truth - start).norm())


def test_resumed_run_repeats_batches_noise_and_thresholds(device: torch.device, tmp_path: Path) -> None:
    clip = MODES["adaptive_layer"]
    full = trained(trainer(clip, device))
    first = trained(trainer(clip, device), range(2))
    first.save(tmp_path / "checkpoint.pt", {})
    state = load_checkpoint(tmp_path / "checkpoint.pt", device)
    assert state["noise_generator"] == "Philox" and state["noise_key"] == KEY
    source = NoiseSource.from_state(state)
    resumed = trainer(clip, device, noise=source)
    resumed.load_state_dict(state)
    trained(resumed, range(2, STEPS))
    torch.testing.assert_close(weights(resumed), weights(full), rtol=1e-4, atol=1e-6)
    assert full.private.thresholds is not None and resumed.private.thresholds is not None
    torch.testing.assert_close(
        resumed.private.thresholds.clip_thresholds, full.private.thresholds.clip_thresholds, rtol=1e-6, atol=0
    )


def test_run_resumed_on_the_cpu_keeps_its_noise(device: torch.device, tmp_path: Path) -> None:
    clip = MODES["flat"]
    full = trained(trainer(clip, device, noise=NoiseSource(KEY, generator="Philox")))
    first = trained(trainer(clip, device), range(2))
    first.save(tmp_path / "checkpoint.pt", {})
    state = load_checkpoint(tmp_path / "checkpoint.pt", "cpu")
    source = NoiseSource.from_state(state)
    moved = trainer(clip, torch.device("cpu"), noise=source)
    moved.load_state_dict(state)
    trained(moved, range(2, STEPS))
    assert float((weights(moved) - weights(full)).norm()) <= 0.02 * float((weights(full) - weights(first)).norm())


@pytest.mark.parametrize("mode", MODES)
def test_out_of_memory_halves_the_microbatch_and_keeps_the_result(
    device: torch.device, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = trained(trainer(MODES[mode], device), range(2))
    short = trainer(MODES[mode], device)
    assert isinstance(short.task, Images)
    short.task.calls, short.task.fails = 0, (2, 4)  # after the first microbatch, at 16 and at 8 examples
    trained(short, range(2))
    assert short.private.sums.size == 4 and "4 examples at once" in capsys.readouterr().err
    torch.testing.assert_close(weights(short), weights(usual), rtol=1e-4, atol=1e-5)


def recorded(run: Trainer) -> Trainer:
    if run.private.device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    graphs = Graphs(recorder_of(run.private.device), run.task.model)
    run.private.sums = TaskSums(run.task, run.private.sums.size, graphs)
    return run


def graphs_of(run: Trainer) -> Graphs:
    assert isinstance(run.private.sums, TaskSums) and run.private.sums.graphs is not None
    return run.private.sums.graphs


@pytest.mark.parametrize("mode", MODES)
def test_recorded_microbatches_match_eager_ones(device: torch.device, mode: str) -> None:
    eager, found = trainer(MODES[mode], device, microbatch=4), recorded(trainer(MODES[mode], device, microbatch=4))
    trained(eager)
    trained(found)
    assert len(graphs_of(found)) >= 1
    torch.testing.assert_close(weights(found), weights(eager), rtol=1e-4, atol=1e-6)
    assert found.private.thresholds is not None and eager.private.thresholds is not None
    torch.testing.assert_close(
        found.private.thresholds.clip_thresholds, eager.private.thresholds.clip_thresholds, rtol=1e-6, atol=0
    )


def test_recorded_dropout_mask_depends_on_the_microbatch(device: torch.device) -> None:
    run = trainer(MODES["adaptive_layer"], device)
    run.task.model[4] = nn.Dropout(0.5)  # type: ignore[index]  # replaces a ReLU
    run = recorded(run)
    private, examples = run.private, run.private.sampler.indices(0)[:8]
    present = torch.ones(8, dtype=torch.bool, device=device)

    def sums(start: int) -> Tensor:
        private.clear()
        with private.microbatch(0, start):
            run.private.sums.run(private, 0, start, examples, present)  # type: ignore[attr-defined]
        return torch.cat([p.grad.flatten() for p in run.task.model.parameters() if p.grad is not None]).clone()

    graphs = graphs_of(run)
    with full_float32(), graphs.recorder.running():
        [sums(0) for _ in range(WARM_UP + 2)]  # the first allocates the gradients, the last is recorded
        assert len(graphs) == 1
        first, other, again = sums(0), sums(8), sums(0)
    torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-7)
    assert float((other - first).norm()) > 0.01 * float(first.norm())
