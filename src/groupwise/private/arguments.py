"""Says of which kind the arguments of `make_private` are, and what is meant by names that are none of them."""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn
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
    "check": (Callable, "a function from examples' numbers to their losses"),
    "noise_source": (NoiseSource, "a groupwise.privacy.NoiseSource"),
    "ranks": (Alone | Ranks, "groupwise.training.ranks.Ranks()"),
}
"""Argument -> its type, and the same in words; None is for all but three. Others are checked where they are read."""
NEEDED = ("model", "optimizer", "clip")
INSTEAD = {
    **dict.fromkeys(("learning_rate", "momentum", "weight_decay"), "the optimizer has it"),
    "sample_rate": "give batch_size, which is sample_rate times the number of examples",
    "microbatch": "private.batches takes it",
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


def tensor_losses(check: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """The function ``check`` of `make_private`, held to giving a tensor.

    Raises:
        UserError: when it is called, and gives something else.
    """

    def held(rows: Any) -> Tensor:
        given = check(rows)
        if not isinstance(given, Tensor):
            raise UserError(
                f"check= gave a {type(given).__name__}, and losses are a tensor: return one loss for each example "
                "(reduction='none')."
            )
        return given

    return held


def unknown_setting(name: str, known: Iterable[str]) -> UserError:
    """The error for a setting that does not exist, with what was probably meant."""
    ours = OURS.get(name, name)
    hint = f": {INSTEAD[ours]}" if ours in INSTEAD else did_you_mean(ours, known)
    return UserError(f"make_private knows no setting {name!r}{hint}.")
