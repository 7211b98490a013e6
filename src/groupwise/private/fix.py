"""Replaces the layers of a model that no private training takes, where a standard layer can stand in for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MOST_GROUPS, LEAST_CHANNELS = 32, 4
"""Of a GroupNorm. A group of one channel would erase what a global average pooling passes on."""
SPOILT: dict[str, tuple[Any, str]] = {
    "max_norm": (None, "rows of its weight are no longer rescaled to that norm"),
    "scale_grad_by_freq": (False, "gradients of rare rows are no longer larger"),
    "sparse": (False, "its gradients are dense, as noise is"),
}
"""Options of `nn.Embedding` -> the value that can be trained privately, and what that changes."""


def fix_model(model: nn.Module) -> list[str]:
    """Replace what `make_private` refuses and a standard layer can stand in for, in place; say what has changed.

    | layer | becomes | kept | lost |
    |---|---|---|---|
    | BatchNorm in training mode, or without running statistics | GroupNorm | weight, bias, eps | running statistics |
    | InstanceNorm with running statistics | the same without | weight, bias, eps | running statistics |
    | `nn.Embedding` with max_norm, scale_grad_by_freq, sparse | without | weight | the option |

    Parameters stay the same objects, so an optimiser that was made before goes on with them. A GroupNorm has at most 32
    groups, of at least 4 channels where there are as many. **It computes something else than the BatchNorm did:**
    a pretrained model has to be fine-tuned. BatchNorm in eval mode is not refused and stays as it is: `.eval()` on it,
    before `make_private`, keeps what a pretrained model computes.

    Args:
        model: any; what it holds in several places is replaced in all of them.

    Returns:
        One sentence for each layer that was changed; none where the model was fine.

    Raises:
        UserError: a subclass of BatchNorm, whose own forward would be lost; a lazy layer; ``model`` is the BatchNorm.
            Nothing has changed then.
    """
    replaced = {
        module: made for name, module in model.named_modules() if (made := _replacement(name, module)) is not None
    }
    said = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replaced:
            parent, _, last = name.rpartition(".")
            new, sentence = replaced[module]
            setattr(model.get_submodule(parent), last, new)
            said.append(f"{name}: {sentence}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            for option, (fit, changes) in SPOILT.items():
                if getattr(module, option) != fit:
                    said.append(f"{name}: Embedding without {option}={getattr(module, option)}: {changes}.")
                    setattr(module, option, fit)
    return said


def _replacement(name: str, module: nn.Module) -> tuple[nn.Module, str] | None:
    """The replacement of a module, and a sentence about it; None where the module stays."""
    make: Callable[[Any], tuple[nn.Module, str]]
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        make, exact = _group_norm, type(module) in BATCH_NORMS
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        make, exact = _instance_norm, type(module).__module__ == nn.InstanceNorm1d.__module__
    else:
        return None
    kind = type(module).__name__
    if not name:
        raise UserError(f"The model is a {kind} itself, which cannot be replaced within it: give the model around it.")
    if isinstance(module, _LazyNormBase):
        raise UserError(f"Layer {name!r} ({kind}) has no size yet: run the model once, then fix it.")
    if not exact:
        raise UserError(
            f"Layer {name!r} ({kind}) is a BatchNorm or InstanceNorm of another class, whose own forward a standard "
            "layer would not have: replace it yourself, or call .eval() on it before make_private."
        )
    return make(module)


def _group_norm(module: Any) -> tuple[nn.Module, str]:
    channels = module.num_features
    groups = max(
        n for n in range(1, MOST_GROUPS + 1) if channels % n == 0 and (n == 1 or channels // n >= LEAST_CHANNELS)
    )
    new = _with_parameters(nn.GroupNorm(groups, channels, eps=module.eps, affine=False), module)
    kept = "weight and bias are kept" if module.affine else "neither has a weight"
    seen = module.num_batches_tracked is not None and int(module.num_batches_tracked) > 0
    lost = ", what it had learnt of the data's mean and variance is dropped" if seen else ""
    return new, f"{type(module).__name__}({channels}) became GroupNorm({groups}, {channels}); {kept}{lost}."


def _instance_norm(module: Any) -> tuple[nn.Module, str]:
    kind = type(module)
    new = _with_parameters(kind(module.num_features, eps=module.eps), module)
    return new, (
        f"{kind.__name__}({module.num_features}) without running statistics: training computes the same, and "
        "evaluation takes each example's own mean and variance."
    )


def _with_parameters(new: Any, old: Any) -> nn.Module:
    """``new`` with the very parameters of ``old``, in its mode."""
    new.affine = old.affine
    for name in ("weight", "bias"):
        parameter: torch.nn.Parameter | None = getattr(old, name)
        setattr(new, name, parameter)
    return new.train(old.training)
