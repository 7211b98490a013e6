"""What Lightning and Accelerate would do by themselves to a private model is refused in a sentence."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from groupwise import make_private
from groupwise.errors import UserError

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
DATA = TensorDataset(X, Y)
SETTINGS = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "steps": 3, "batch_size": 20}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def prepared(**options):
    """Accelerate's accelerator, model and optimiser, and torch's optimiser."""
    accelerator = Accelerator(cpu=True, **options)
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, plain), plain


def test_accelerates_optimizer_is_refused_and_the_one_inside_works():
    _, model, wrapped, plain = prepared()
    with pytest.raises(UserError, match="wrapped in AcceleratedOptimizer"):
        make_private(model, wrapped, DATA, **SETTINGS)
    assert wrapped.optimizer is plain
    private = make_private(model, wrapped.optimizer, DATA, **SETTINGS)
    for x, y in private.batches(8):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        private.step()
    assert private.executed == 3


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda accelerator, losses, wrapped, model: accelerator.backward(losses.mean()), "one loss per example"),
        (lambda accelerator, losses, wrapped, model: wrapped.step(), "without noise"),
    ],
)
def test_accelerates_own_steps_are_refused(do, words):
    accelerator, model, wrapped, plain = prepared()
    private = make_private(model, plain, DATA, **SETTINGS)
    for x, y in private.batches(8):
        losses = F.cross_entropy(model(x), y, reduction="none")
        with pytest.raises(UserError, match=words):
            do(accelerator, losses, wrapped, model)
        break


def test_gradients_that_accelerate_clips_are_refused():
    accelerator, model, _, plain = prepared()
    private = make_private(model, plain, DATA, **SETTINGS)
    for x, y in private.batches(8):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UserError, match="Gradients were changed"):
            private.step()
        break


def module(step, automatic: bool, wrapped: bool = False):
    """A Lightning module whose training step is ``step(self, losses)``."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.network = automatic, network()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
            if not wrapped:
                self.private = make_private(self.network, optimizer, DATA, **SETTINGS)
            return optimizer

        def training_step(self, turn):
            if wrapped:
                make_private(self.network, self.optimizers(), DATA, **SETTINGS)
            x, y = next(self.private.batches(8, steps=1))
            return step(self, F.cross_entropy(self.network(x), y, reduction="none"))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(Module(), range(1))


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (lambda self, losses: losses.mean(), {"automatic": True}, "without noise"),
        (lambda self, losses: self.manual_backward(losses.mean()), {"automatic": False}, "one loss per example"),
        (lambda self, losses: self.optimizers().step(), {"automatic": False}, "without noise"),
        (None, {"automatic": False, "wrapped": True}, "wrapped in LightningSGD"),
    ],
)
def test_lightnings_own_steps_are_refused(step, options, words):
    with pytest.raises(UserError, match=words):
        module(step, **options)


def test_one_of_several_processes_does_not_draw_alone(monkeypatch):
    model = network()
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, **SETTINGS)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes train, and make_private knows of 1"):
        private.batches(8)
