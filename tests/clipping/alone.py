"""Compare the engine with a loop over single examples; several partitions, thresholds and rules can share a loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.clipping.partition import Partition
from groupwise.clipping.reference import clipped_sums
from tests.clipping.traced import clip

Loss = Callable[[int], Tensor]


def looped(model: nn.Module, loss_of: Loss, examples: Iterable[int]) -> Loss:
    """Losses with precomputed gradients: those of `loss_of` for each example alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_example = {i: torch.autograd.grad(loss_of(i), parameters, allow_unused=True) for i in examples}
    return lambda i: _GivenGradients.apply(by_example[i], *parameters)


class _GivenGradients(torch.autograd.Function):
    """A loss whose backward pass returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, *ctx.gradients


def middle_thresholds(model: nn.Module, loss_of: Loss, partition: Partition, rows: Sequence[int]) -> list[float]:
    """Thresholds that clip only some examples: the mean of the two middle norms of each group."""
    norms = clipped_sums(model, loss_of, rows, partition, [1.0] * len(partition)).norms
    middle = norms.sort(1).values[:, max(len(rows) // 2 - 1, 0) : len(rows) // 2 + 1]
    return middle.mean(1).clamp_min(1e-6).tolist()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every `.grad` that is not None."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-9, atol: float = 1e-12
) -> None:
    """Each tensor differs from the expected one by at most `rtol` times its norm, plus `atol`."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error, size = float((found[name] - tensor).norm()), float(tensor.norm())
        assert error <= rtol * size + atol, (name, error, size)


def assert_sums(model: nn.Module, expected: Mapping[str, Tensor], rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Every trainable parameter has the expected sum as its `.grad`; the others have none."""
    assert expected.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert_equal(gradients(model), expected, rtol, atol)


def assert_exact(
    engine: ClippingEngine,
    losses_of: Callable[[Sequence[int]], Tensor],
    rows: Sequence[int],
    thresholds: list[float] | None = None,
    loop: Loss | None = None,
) -> None:
    """Norms, sums and counts of these examples match a loop, by default at `middle_thresholds`."""
    model, partition = engine.model, engine.partition
    loop = looped(model, lambda i: losses_of([i])[0], rows) if loop is None else loop
    thresholds = middle_thresholds(model, loop, partition, rows) if thresholds is None else thresholds
    engine.set_thresholds(thresholds)
    truth = clipped_sums(model, loop, rows, partition, thresholds)
    model.zero_grad()
    counted = engine.counts
    clip(engine, losses_of, rows)
    torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-10)
    if len(rows) > 1:  # with one example the threshold equals its norm
        assert torch.equal(engine.counts - counted, truth.counts)
    assert_sums(model, truth.sums, rtol=1e-9, atol=1e-10 * max(thresholds))


def assert_bounded(engine: ClippingEngine, losses_of: Callable[[Sequence[int]], Tensor], rows: Sequence[int]) -> None:
    """Each of these examples alone has a clipped gradient of at most the threshold in every group."""
    for example in rows:
        engine.model.zero_grad()
        clip(engine, losses_of, [example])
        for group, threshold in zip(engine.groups, engine.thresholds.tolist(), strict=True):
            norm = torch.stack([p.grad.square().sum() for p in group.parameters]).sum().sqrt()
            assert float(norm) <= threshold * (1 + 1e-9), (example, group.name)
