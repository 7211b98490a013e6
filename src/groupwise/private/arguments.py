"""Checks the model, the optimiser and the argument names that are passed to `make_private`."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from groupwise.config.keys import OURS
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, did_you_mean

TRAINED: WeakKeyDictionary[nn.Module, ReferenceType[Any]] = WeakKeyDictionary()
"""The modules of all private trainings that were not detached, and these trainings."""
STEPPED: WeakSet[nn.Module] = WeakSet()
"""The layers of which a private step of this process has released parameters."""
PRIVATE_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()
"""The optimisers of private trainings, whose state comes from private steps."""

INSTEAD = {
    **dict.fromkeys(("learning_rate", "momentum", "weight_decay"), "set it in the optimizer"),
    "sample_rate": "give batch_size, which is sample_rate times the number of examples",
    "poisson_sampling": "leave it out, as batches are always Poisson samples",
    "loss_reduction": "leave it out, as losses(model, batch) gives one loss for each example",
    "batch_first": "leave it out, as the trace finds the batch axis",
    **dict.fromkeys(("noise_generator", "secure_mode"), "give noise_source=NoiseSource.fresh(secure=True)"),
}
"""Names in other libraries that `make_private` does not have -> what to do instead."""


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UserError` for a wrapped or unsuitable optimiser, one that does not have exactly the trainable
    parameters of the model, or one with state (such as momentum) from steps that were not private."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if (closure and closure.default is closure.empty) or isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(f"{type(optimizer).__name__} does not work with private steps: use SGD or Adam, for example.")
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):  # by Accelerate or Lightning
        raise UserError(f"The optimizer is wrapped in {type(optimizer).__name__}: give optimizer.optimizer.")
    known = {id(parameter) for parameter in model.parameters()}
    moved = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, parameter in moved.items():
        if key not in known:
            raise UserError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, so its "
                "gradient is not clipped: make it over model.parameters()."
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in moved:
            raise UserError(
                f"Parameter {name!r} is trainable but not in the optimizer: freeze it before make_private, or add it."
            )
    used = (state for state in optimizer.state.values() if state.get("step", 1))  # Adagrad's is not empty at step 0
    values = (value for state in used for value in state.values() if isinstance(value, Tensor))
    if optimizer not in PRIVATE_OPTIMIZERS and any(bool(value.any()) for value in values):
        raise UserError(
            f"The optimizer ({type(optimizer).__name__}) has state from earlier steps, so unclipped gradients could "
            "still influence the model: make a new optimizer for the same parameters."
        )


Given = ParamSpec("Given")
T = TypeVar("T")


def knows_names(make: Callable[Given, T]) -> Callable[Given, T]:
    """Make `make_private` refuse names that are neither its arguments nor fields of `ClipConfig`, and suggest others.

    For Opacus' ``module`` and ``data_loader`` Python would only say that ``model`` and ``data`` are missing.
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
            raise UserError(f"make_private has no argument {'; nor '.join(answers)}.")
        return make(*values, **named)

    return call


def trainings_of(model: nn.Module) -> list[Any]:
    """The private trainings of a model, or of parts of it, that were not detached."""
    found = (TRAINED[module]() for module in model.modules() if module in TRAINED)
    return list(dict.fromkeys(training for training in found if training is not None))


def check_count(name: str, value: Any, least: int) -> None:
    """Raise a `UserError` if a value is given that is not a whole number of at least ``least``."""
    if not (value is None or (isinstance(value, Integral) and int(value) >= least)):
        raise UserError(f"{name}={value!r} must be a whole number of at least {least}.")
