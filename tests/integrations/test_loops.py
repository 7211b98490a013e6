"""Optimizer steps that Lightning and Accelerate take by themselves are refused in one sentence."""

import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from groupwise import make_private
from groupwise.errors import UserError
from tests.private_use import DATA, X, Y, cross_entropy, network

SETTINGS = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "steps": 3, "batch_size": 20}


def prepared(**options):
    """Accelerate's accelerator, model and optimiser, and torch's optimiser."""
    accelerator = Accelerator(cpu=True, **options)
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, plain), plain


def test_accelerates_optimizer_is_refused_and_the_wrapped_one_works():
    _, model, wrapped, plain = prepared()
    with pytest.raises(UserError, match=r"wrapped in AcceleratedOptimizer.*optimizer\.optimizer"):
        make_private(model, wrapped, DATA, cross_entropy, **SETTINGS)
    assert wrapped.optimizer is plain
    private = make_private(model, wrapped.optimizer, DATA, cross_entropy, **SETTINGS)
    assert [step.number for step in private.steps()] == [1, 2, 3]


def test_a_loader_that_accelerate_has_prepared_gives_its_dataset():
    accelerator, model, _, plain = prepared()
    loader = accelerator.prepare(DataLoader(DATA, 4, shuffle=True))
    with pytest.warns(UserWarning, match="data is a DataLoader"):
        private = make_private(model, plain, loader, cross_entropy, **SETTINGS)
    assert private.plan.dataset_size == 40 and len(list(private.steps())) == 3


def module(step, automatic: bool, wrapped: bool = False):
    """Fit a Lightning module whose training step is ``step(self)``, and return it."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.network = automatic, network()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
            if not wrapped:
                self.private = make_private(self.network, optimizer, DATA, cross_entropy, **SETTINGS)
            return optimizer

        def training_step(self, turn):
            if wrapped:
                make_private(self.network, self.optimizers(), DATA, cross_entropy, **SETTINGS)
            return step(self)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fitter = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    fitted = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitter.fit(fitted, range(1))
    return fitted


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (lambda self: cross_entropy(self.network, (X, Y)).mean(), {"automatic": True}, "calls optimizer.step"),
        (lambda self: self.optimizers().step(), {"automatic": False}, "calls optimizer.step"),
        (None, {"automatic": False, "wrapped": True}, "wrapped in LightningSGD"),
    ],
)
def test_lightnings_own_steps_are_refused(step, options, words):
    with pytest.raises(UserError, match=words):
        module(step, **options)


def test_lightnings_backward_between_steps_changes_nothing():
    def step(self):
        self.manual_backward(cross_entropy(self.network, (X, Y)).mean())
        gradients.append([p.grad.clone() for p in self.network.parameters()])
        self.private.step()

    gradients: list[list[torch.Tensor]] = []
    fitted = module(step, automatic=False)
    left = [p.grad for p in fitted.network.parameters()]
    assert fitted.private.executed == 1 and not any(map(torch.equal, gradients[0], left))


def test_a_step_in_one_of_several_processes_is_refused(monkeypatch):
    model = network()
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, cross_entropy, **SETTINGS)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes train, but make_private was called for 1"):
        private.step()
