"""A module in plain operations is torch's own: results and every gradient, to 1e-12 in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves


def leaves(nested: object) -> list[Tensor]:
    """All tensors of a result, packed data included."""
    flat = tree_leaves(nested, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [part.data if isinstance(part, PackedSequence) else part for part in flat if part is not None]


def assert_same(
    module: nn.Module, expressed: Callable, run: Callable[[Callable], object], inputs: Sequence[Tensor] = (), seed=0
) -> list[Tensor]:
    """`run(forward)` gives the same for the module's own forward and `expressed(module, ...)`; returns the latter's
    results. `inputs` are what gradients are taken of beside the parameters."""
    slopes, sides = None, []
    for forward in (module, lambda *args, **options: expressed(module, *args, **options)):
        torch.manual_seed(seed)
        results = leaves(run(forward))
        slopes = slopes or [torch.randn_like(part) for part in results]
        loss = sum((part * slope).sum() for part, slope in zip(results, slopes, strict=True))
        trained = [p for p in module.parameters() if p.requires_grad]
        distinct = list({id(x): x for x in inputs}.values())
        sides.append([*results, *torch.autograd.grad(loss, trained + distinct)])
    for own, other in zip(*sides, strict=True):
        assert own.shape == other.shape and own.dtype == other.dtype
        torch.testing.assert_close(other, own, rtol=1e-12, atol=1e-12, equal_nan=True)
    return sides[1][: len(slopes)]
