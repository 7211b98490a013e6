"""Weights to start from that an earlier run left behind, whatever the number of its stages."""

from glob import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.pipeline.checkpoint import read_weights
from groupwise.pipeline.pieces import Stage


def start_from(model: nn.Module, given: str) -> None:
    """Load `model.weights` into a whole model or into a stage of it, in place.

    Not covered by the run's privacy plan: what those weights themselves cost. Trained on the same examples, the two
    budgets add up.

    Args:
        model: of the run, before anything is attached to it.
        given: a finished run's folder, or the model.pt in it.

    Raises:
        UserError: nothing there, weights of another model, or weights that are not finite.
    """
    path = Path(given).expanduser()
    path = path / "model.pt" if path.is_dir() else path
    if not path.is_file() and not list(path.parent.glob(escape(f"{path.stem}-") + "*" + escape(path.suffix))):
        raise UserError(f"model.weights={given} holds no model.pt: name a finished run's folder.")
    own = model.state_dict()
    weights = read_weights(path, model.names() if isinstance(model, Stage) else {name: name for name in own})
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype != own[name].dtype:
            raise UserError(
                f"model.weights={given} has a {name} that is no {own[name].dtype} tensor: give a run's model.pt."
            )
        if tensor.shape != own[name].shape:
            raise UserError(
                f"model.weights={given} has {name} of shape {tuple(tensor.shape)} and the model wants "
                f"{tuple(own[name].shape)}: give the weights of the same model."
            )
        if not tensor.isfinite().all():
            raise UserError(f"model.weights={given} has a {name} that is not finite: give other weights.")
    model.load_state_dict(weights)
    print(f"Weights: {path}; what they cost in privacy comes on top of what follows.")
