"""Says of which kind the arguments of `make_private` are, and what is meant by names that are none of them."""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from groupwise.clipping import Group
from groupwise.config.names import OURS
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, did_you_mean
from groupwise.privacy import NoiseSource, PrivacyPlan
from groupwise.training.ranks import Alone, Ranks

KINDS: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "optimizer": (Optimizer, "an optimizer of torch.optim over the model's parameters"),
    **dict.fromkeys(("epsilon", "noise_multiplier", "delta", "epochs", "steps", "batch_size"), (Real, "a number")),
    "plan": (PrivacyPlan, "a plan of groupwise.privacy.make_plan"),
    "clip": (str | ClipConfig | tuple | list, "a mode's name, a partition of a group or more, or a ClipConfig"),
    "losses": (Callable, "a function of the model and a batch that returns one loss for each of its examples"),
    "noise_source": (NoiseSource, "a groupwise.privacy.NoiseSource"),
    "ranks": (Alone | Ranks, "groupwise.training.ranks.Ranks()"),
}
"""Argument -> its type, and the same in words; None is for all but four. Others are checked where they are read."""
NEEDED = ("model", "optimizer", "losses", "clip")
INSTEAD = {
    **dict.fromkeys(("learning_rate", "momentum", "weight_decay"), "the optimizer has it"),
    "sample_rate": "give batch_size, which is sample_rate times the number of examples",
}
"""Names that are no arguments -> what to do."""


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse arguments of another type.

    Raises:
        UserError: naming the first, and what was expected.
    """
    for name, (kind, expected) in KINDS.items():
        value = given[name]
        fits = isinstance(value, kind) or (value is None and name not in NEEDED)
        if isinstance(value, tuple | list):
            fits = fits and len(value) > 0 and all(isinstance(group, Group) for group in value)
        if not fits:
            brief = isinstance(value, str | int | float | None) or (isinstance(value, tuple | list) and not value)
            shown = f"={value!r}" if brief else f", a {type(value).__name__},"
            raise UserError(f"{name}{shown} does not fit: {expected} was expected.")


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser that moves anything else than the model's trainable parameters, or not all of them.

    Raises:
        UserError: naming a parameter.
    """
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


def unknown_setting(name: str, known: Iterable[str]) -> UserError:
    """The error for a setting that does not exist, with what was probably meant."""
    ours = OURS.get(name, name)
    hint = f": {INSTEAD[ours]}" if ours in INSTEAD else did_you_mean(ours, known)
    return UserError(f"make_private knows no setting {name!r}{hint}.")
