"""Sees what something else than the private loop did to gradients, parameters, hooks and modes, and refuses it."""

import torch
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.training.mechanism import Mechanism


class Watch:
    """What the gradients and parameters of a private training were when it last touched them.

    Args:
        mechanism: of the training; modules that are in eval mode inside of a model that trains must stay so.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._model, self._trainable = mechanism.model, mechanism.trainable
        self._marks: list[tuple[Tensor | None, int, int]] = []
        self._still: dict[str, nn.Module] = {}
        if self._model.training:
            self._still = {name: module for name, module in self._model.named_modules() if not module.training}

    def mark(self) -> None:
        """All is as it should be."""
        self._marks = self._now()

    def _now(self) -> list[tuple[Tensor | None, int, int]]:
        """Each parameter's gradient, how often it was changed, and how often the parameter was."""
        both = [(parameter.grad, parameter) for parameter in self._trainable]
        return [(grad, 0 if grad is None else _changes(grad), _changes(parameter)) for grad, parameter in both]

    def check_gradients(self) -> None:
        """Refuse what changed since `mark`.

        Raises:
            UserError: a gradient is another tensor, or was changed in place, or a parameter was.
        """
        pairs = list(zip(self._now(), self._marks, strict=True))
        if any(now[0] is not then[0] or now[1] != then[1] for now, then in pairs):
            raise UserError(
                "Gradients were changed by something else than private.backward(losses): leave out loss.backward(), "
                "optimizer.zero_grad(), clip_grad_norm_ and GradScaler, and put penalties into the losses."
            )
        if any(now[2] != then[2] for now, then in pairs):
            raise UserError(
                "Parameters were changed within a batch, whose gradients have no noise yet: leave out any other "
                "optimizer's step(), and change them when private.step() has returned True."
            )

    def check_modules(self) -> None:
        """Refuse hooks of trainable parameters, and modules that left eval mode.

        Raises:
            UserError: naming the parameter or module.
        """
        for parameter in self._trainable:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                name = next((name for name, other in self._model.named_parameters() if other is parameter), "")
                raise UserError(
                    f"Parameter {name!r} has a hook, which sees clipped sums without noise and may change them: remove "
                    "it."
                )
        for name, module in self._still.items():
            if module.training:
                raise UserError(
                    f"Module {name!r} was in eval mode when make_private was called, and trains now: put it back after "
                    "model.train(), or into training mode before make_private."
                )


def _changes(tensor: Tensor) -> int:
    """How often it was changed in place; a shard, as such or as the tensor that this process holds of it."""
    own = getattr(tensor, "_local_tensor", None)
    return tensor._version + (0 if own is None else own._version)


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
