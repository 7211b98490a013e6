"""Times each part of a model on this machine, for stages of even time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.pipeline.model_parts import dissect
from groupwise.pipeline.split import cut
from groupwise.training.task import Microbatch


def measure_costs(
    model: nn.Module,
    microbatch: Microbatch,
    repeats: int = 3,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Seconds forward and backward of the embedding, of each of n blocks, and of head and loss, (n + 2,).

    Without clipping; the least of `repeats` times each, on the model's own device. The model can be used afterwards.
    Processes measure different times: one should measure, and tell the others.

    Args:
        model: as `cut` takes it, with real parameters.
        microbatch: on the model's device.
        repeats: how often each part runs.
        precision: as in `cut`.
    """
    anatomy = dissect(model)
    whole = cut(model, ((0, len(anatomy.blocks)),), 0, precision=precision)
    modules = (*anatomy.entry, *anatomy.blocks)
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = args, kwargs

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            hidden = whole.hidden(microbatch.first, **{n: microbatch.kwargs[n] for n in whole.reads})
    finally:
        for hook in hooks:
            hook.remove()

    def seconds(module: nn.Module) -> float:
        args, kwargs = calls[module]

        def run(x: Tensor) -> Any:
            with precision():
                return module(x, *args[1:], **kwargs)

        return _seconds(run, args[0], tuple(module.parameters()), repeats)

    ends = tuple(p for module in anatomy.exit for p in module.parameters())
    return [
        sum(seconds(module) for module in anatomy.entry),
        *(seconds(block) for block in anatomy.blocks),
        _seconds(lambda x: whole.losses(x, microbatch.kwargs), hidden, ends, repeats),
    ]


def _seconds(run: Callable[[Tensor], Any], x: Tensor, parameters: Sequence[Tensor], repeats: int) -> float:
    """The least time of a pass forward and backward, to `x` and to the parameters that train."""
    x = x.detach().requires_grad_(x.is_floating_point())
    wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
    times = []
    for _ in range(repeats):
        _wait(x.device)
        start = perf_counter()
        made = run(x)
        made = made[0] if isinstance(made, tuple) else made
        if wanted:
            torch.autograd.grad(made, wanted, torch.ones_like(made), allow_unused=True)
        _wait(x.device)
        times.append(perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
