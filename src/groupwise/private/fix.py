"""Replaces the BatchNorm layers of a model, which mix examples, by GroupNorm."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from groupwise.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MOST_GROUPS, LEAST_CHANNELS = 32, 4
"""The most groups of a GroupNorm, and the least channels of a group if possible. With one channel per group, a global
average pooling would return a constant."""


def fix_model(model: nn.Module) -> list[str]:
    """Replace each BatchNorm that `make_private` refuses by a GroupNorm, in place.

    A BatchNorm is refused in training mode, or without running statistics. Weight and bias stay the same objects, so an
    existing optimiser remains valid. Running statistics are lost. The GroupNorm has at most 32 groups, of at least 4
    channels if possible. **It does not compute the same function,** so a pretrained model must be fine-tuned. A
    BatchNorm in eval mode is neither refused nor replaced. To keep the function of a pretrained model, call `.eval()`
    on its BatchNorm layers before `make_private`.

    Args:
        model: the model. A layer that occurs in several places is replaced in all of them.

    Returns:
        One sentence for each layer that was replaced.

    Raises:
        UserError: a layer is a subclass of BatchNorm with a forward of its own, or ``model`` itself is a BatchNorm. The
            model is then unchanged.
    """
    replaced = {
        module: _group_norm(name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    }
    said = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replaced:
            parent, _, last = name.rpartition(".")
            new, sentence = replaced[module]
            setattr(model.get_submodule(parent), last, new)
            said.append(f"{name}: {sentence}")
    return said


def _group_norm(name: str, module: Any) -> tuple[nn.Module, str]:
    """The GroupNorm that replaces a BatchNorm, and a sentence about it."""
    kind = type(module).__name__
    if not name:
        raise UserError(f"The model itself is a {kind}, which cannot be replaced in place: give the model around it.")
    if type(module) not in BATCH_NORMS:
        raise UserError(
            f"Layer {name!r} ({kind}) is a subclass of BatchNorm, and may compute something else: replace it yourself, "
            "or call .eval() on it before make_private."
        )
    channels = module.num_features
    groups = max(
        n for n in range(1, MOST_GROUPS + 1) if channels % n == 0 and (n == 1 or channels // n >= LEAST_CHANNELS)
    )
    new: Any = nn.GroupNorm(groups, channels, eps=module.eps, affine=False).train(module.training)
    new.affine, new.weight, new.bias = module.affine, module.weight, module.bias
    kept = "weight and bias are kept" if module.affine else "it has no weight and bias"
    seen = module.num_batches_tracked is not None and int(module.num_batches_tracked) > 0
    lost = ", the running mean and variance are dropped" if seen else ""
    return new, f"{kind}({channels}) became GroupNorm({groups}, {channels}); {kept}{lost}."
