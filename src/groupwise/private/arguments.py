"""Checks the arguments of `make_private` that need no other: the model, the optimiser, unknown names."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from groupwise.config.keys import OURS
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, did_you_mean

PRIVATE_MODULES: WeakSet[nn.Module] = WeakSet()
"""Modules that are in a private training."""
PRIVATE_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()
"""Optimizers that took private steps alone, as far as is known."""


INSTEAD = {
    **dict.fromkeys(("learning_rate", "momentum", "weight_decay"), "the optimizer has it"),
    "sample_rate": "give batch_size, which is sample_rate times the number of examples",
    "poisson_sampling": "leave it out, as batches are always Poisson samples",
    "loss_reduction": "leave it out, as losses(model, batch) gives one loss for each example",
    "batch_first": "leave it out, as the trace finds the batch axis",
    **dict.fromkeys(("noise_generator", "secure_mode"), "give noise_source, NoiseSource.fresh(secure=True) say"),
}
"""Names that are no arguments -> what to do."""


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a wrapped optimiser, or one that moves other parameters than the model's trainable ones, or not all.

    Raises:
        UserError: naming a parameter.
    """
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):  # Accelerate's and Lightning's step by themselves
        raise UserError(f"The optimizer is wrapped in {type(optimizer).__name__}: give optimizer.optimizer.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in moved:
        if id(parameter) not in names:
            raise UserError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, so its "
                "gradient is not clipped: make it over model.parameters()."
            )
    there = {id(parameter) for parameter in moved}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in there:
            raise UserError(
                f"Parameter {name!r} trains but is not in the optimizer: freeze it before make_private, or add it."
            )


Given = ParamSpec("Given")
T = TypeVar("T")


def knows_names(make: Callable[Given, T]) -> Callable[Given, T]:
    """`make_private`, which refuses names that are neither arguments of it nor fields of `ClipConfig`.

    First of all, so that Opacus' ``module`` and ``data_loader`` are answered with the names here, where Python alone
    would miss ``model`` and ``data``.
    """
    known = {*inspect.signature(make).parameters} | {field.name for field in fields(ClipConfig)}
    known -= {"name", "grouping", "mapping"}

    @wraps(make)
    def call(*values: Given.args, **named: Given.kwargs) -> T:
        answers = []
        for name in named:
            if name not in known:
                ours = OURS.get(name, name)
                hint = f": {INSTEAD[ours]}" if ours in INSTEAD else did_you_mean(ours, sorted(known))
                answers.append(f"{name!r}{hint}")
        if answers:
            raise UserError(f"make_private knows no setting {'; nor '.join(answers)}.")
        return make(*values, **named)

    return call


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser whose state, momentum say, comes from steps that were not private, with a `UserError`."""
    moved = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    if optimizer not in PRIVATE_OPTIMIZERS and any(bool(value.any()) for value in moved):
        raise UserError(
            f"The optimizer has state of earlier steps ({type(optimizer).__name__}), in which unclipped gradients may "
            "go on to move the model: make a new one over the same parameters."
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model that is in a private training already, with a `UserError`."""
    if any(module in PRIVATE_MODULES for module in model.modules()):
        raise UserError(
            "The model, or a part of it, is in a private training already, and a second would noise it twice: "
            "private.detach() ends the first."
        )
