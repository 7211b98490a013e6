"""Follows a forward pass through a model's modules, to name the one in which something happened."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Border = Callable[[str, Any], None]
"""Called when a forward pass enters a module ("the input of ...", arguments) or leaves it ("the output of ...")."""

OUTSIDE = "the loss, outside of the model's modules"


class ModuleCalls:
    """The modules that the forward pass is in; inside `followed` only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[str] = []

    @property
    def innermost(self) -> str:
        """The module whose code runs, in words."""
        return self._open[-1] if self._open else OUTSIDE

    @property
    def inside(self) -> bool:
        """Whether any module's code runs."""
        return bool(self._open)

    @contextmanager
    def followed(self, border: Border | None = None) -> Iterator[None]:
        """Inside, modules that are called are known, and `border` hears of each that is entered or left."""
        self._open.clear()
        hooks = []
        for name, module in self._model.named_modules():
            label = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            hooks.append(
                module.register_forward_pre_hook(partial(self._enter, label, border), prepend=True, with_kwargs=True)
            )
            hooks.append(module.register_forward_hook(partial(self._leave, label, border)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, label: str, border: Border | None, module: nn.Module, *given: Any) -> None:
        if border is not None:
            border(f"the input of {label}", given)
        self._open.append(label)

    def _leave(self, label: str, border: Border | None, module: nn.Module, given: Any, made: Any) -> None:
        if border is not None:
            border(f"the output of {label}", made)
        self._open.pop()


class Fingerprints:
    """A few numbers for each chosen row of every tensor that enters or leaves a module, in the order of the calls."""

    def __init__(self, batch: int, rows: Sequence[int]) -> None:
        self._batch, self._rows = batch, list(rows)
        self.taken: list[tuple[str, list[Tensor]]] = []

    def take(self, place: str, values: Any) -> None:
        """Tensors whose first axis is not made of the batch are left out."""
        found = []
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] and tensor.shape[0] % self._batch == 0:
                rows = tensor.detach().reshape(self._batch, -1)[self._rows].double()
                found.append(torch.stack([rows.sum(1), rows.norm(dim=1)]).cpu())
        self.taken.append((place, found))

    def first_difference(self, other: "Fingerprints", tolerance: float) -> str | None:
        """Where the same rows of two forward passes part, in words; None where they never do, as far as is seen."""
        for (place, ours), (there, theirs) in zip(self.taken, other.taken, strict=False):
            if place != there or len(ours) != len(theirs):
                return place
            for a, b in zip(ours, theirs, strict=True):
                size = torch.maximum(a[1], b[1]).nan_to_num()
                moved = (a - b).abs() > tolerance * size + 1e-9
                if bool((moved | (a.isfinite() != b.isfinite())).any()):
                    return place
        return None
